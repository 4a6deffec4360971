"""What the boundary hands on: totals, sources, words, and to which implementation."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import implementation
from pallas_kernels.sample import api as sample_api
from pallas_kernels.verify import api as verify_api

TOTAL, ROWS = 50, 12
integer_rows = jax.jit(pk.integer_rows, static_argnames="total")
draw = jax.jit(pk.draw)
verify_rows = jax.jit(pk.verify_rows, static_argnames=("mode", "total"))
verify_logits = jax.jit(pk.verify_logits, static_argnames="total")
sample_logits = jax.jit(pk.sample_logits, static_argnames="total")


@pytest.fixture
def step(rng):
    """Logits, and drafts that were drawn from rows in an order of their own."""
    logits, drafts = jnp.asarray(rng.normal(size=(2, ROWS, 7)), jnp.float32)
    scale = jnp.asarray(pk.scale_of(np.ones(ROWS)))
    points = jnp.asarray(rng.integers(0, TOTAL, (2, ROWS)), jnp.int32)
    q = integer_rows(drafts, scale, total=TOTAL)
    ids, offsets = draw(q, points[0])
    order = rng.permutation(ROWS)
    pool, source = q[order], jnp.asarray(np.argsort(order), jnp.int32)
    verify = jnp.asarray(np.arange(ROWS) % 4 != 3)
    return logits, scale, pool, source, ids, offsets, verify, points[1], q


def equal(got, expected):
    for name, a, b in zip(expected._fields, got, expected, strict=True):
        np.testing.assert_array_equal(a, b, name)


def test_logits_are_judged_as_their_rows(step):
    logits, scale, pool, source, *judged, q = step
    got = verify_logits(logits, scale, pool, source, *judged, total=TOTAL)
    p = integer_rows(logits, scale, total=TOTAL)
    equal(got, verify_rows(p, q, *judged, total=TOTAL))
    verify = np.asarray(judged[2])
    kept = np.minimum(p, q).sum(1) / TOTAL
    np.testing.assert_allclose(got.accept_prob[verify], kept[verify], rtol=1e-6)
    # Fresh rows look at no row of a draft.
    source = jnp.asarray(np.where(verify, source, 10**6), jnp.int32)
    equal(verify_logits(logits, scale, pool, source, *judged, total=TOTAL), got)


def test_samples_are_draws_from_the_rows(step):
    logits, scale, *_, points, _ = step
    got = sample_logits(logits, scale, points, total=TOTAL)
    rows = integer_rows(logits, scale, total=TOTAL)
    np.testing.assert_array_equal(got.rows, rows)
    np.testing.assert_array_equal(got[:2], draw(rows, points))
    with pytest.raises(ValueError, match="`points` has shape"):
        pk.sample_logits(logits, scale, points[1:])


def test_the_kernels_get_what_the_reference_gets(step, monkeypatch):
    def record(*args, total):
        return args, total

    kernels = types.SimpleNamespace(verify_logits=record, sample_logits=record)
    monkeypatch.setattr(implementation, "why_no_kernels", lambda: None)
    for api in (verify_api, sample_api):
        monkeypatch.setattr(api, "_kernels", lambda: kernels)
    named = dict(total=TOTAL, implementation="pallas")
    *args, _ = step
    assert pk.verify_logits(*args, **named) == (tuple(args), TOTAL)
    drawn = (args[0], args[1], args[-1])
    assert pk.sample_logits(*drawn, **named) == (drawn, TOTAL)


def test_the_penalty_is_that_of_the_engine():
    """Equal rows leave eps of themselves to draw from."""
    row = jnp.full((1, 2), pk.TOTAL // 2, jnp.int32)
    none, one = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
    words = jnp.zeros((1, 2), jnp.uint32)
    args = row, row, none, none, one, none
    got = verify_rows(*args, mode="penalised", words=words)
    np.testing.assert_allclose(1 - got.accept_prob, 4.99988e-5, atol=1e-7)
    p, q = jnp.asarray([[3, 3]], jnp.int32), jnp.asarray([[2, 4]], jnp.int32)
    got = verify_rows(p, q, *args[2:], mode="penalised", words=words, total=6)
    np.testing.assert_allclose(got.accept_prob, 5 / 6, rtol=1e-6)


def test_rows_and_words_are_checked():
    row, vector = jnp.full((2, 3), 2, jnp.int32), jnp.zeros(2, jnp.int32)
    args = row, row, vector, vector, jnp.ones(2, bool), vector
    words = jnp.zeros((2, 2), jnp.uint32)
    with pytest.raises(ValueError, match="`words` are given with mode='exact'"):
        pk.verify_rows(*args, words=words)
    with pytest.raises(ValueError, match="`words` are missing"):
        pk.verify_rows(*args, mode="penalised")
    with pytest.raises(ValueError, match="`words` is uint32"):
        pk.verify_rows(*args, mode="penalised", words=words[:1])
    with pytest.raises(ValueError, match="`q` is uint32; integer rows are int32"):
        pk.verify_rows(row, row.astype(jnp.uint32), *args[2:])
