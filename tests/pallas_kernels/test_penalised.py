"""The penalised residual: its law, enumerated, and its bound."""

import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.locate import locate_offset
from pallas_kernels.verify import penalised

SIXTHS = np.asarray(
    [row for row in itertools.product(range(7), repeat=3) if sum(row) == 6], np.int32
)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def judge(verify, alpha, total, *args):
    return verify(*args, alpha=alpha, total=total)


def emitted_law(p, q, alpha, total, verify=penalised.verify_rows):
    """Exact law of one pair: every point, every residual unit.

    The replacement's words enter only through `scaled`, so every fallen point is
    followed through all residual units.
    """
    point = jnp.arange(total, dtype=jnp.int32)
    p_rows, q_rows = (jnp.asarray(np.tile(x, (total, 1))) for x in (p, q))
    draft, offset = jax.jit(locate_offset)(q_rows, point)
    always = jnp.ones(total, bool)
    spared = q.astype(np.int64) * round((1 - alpha) * 2**32) >> 32
    units = int(np.maximum(p - (q - spared), 0).sum())
    law = [Fraction(0)] * len(p)
    # Midpoints of equal parts of the words: one for every residual unit.
    for unit in range(max(units, 1)):
        high = (2 * unit + 1) * 2**31 // max(units, 1)
        words = np.tile(np.asarray([[high, 0]], np.uint32), (total, 1))
        rows = judge(
            verify, alpha, total, p_rows, q_rows, draft, offset, always, point, words
        )
        for token, count in zip(
            *np.unique(rows.token, return_counts=True), strict=True
        ):
            law[token] += Fraction(int(count), total * max(units, 1))
    return law, rows


def test_the_known_example(golden):
    """1/78 of the mass moves from the first token to the third."""
    p, q = np.asarray([3, 2, 1], np.int32) * 10, np.asarray([2, 3, 1], np.int32) * 10
    law, rows = emitted_law(p, q, 0.9, 60)
    assert law == [Fraction(19, 39), Fraction(1, 3), Fraction(7, 39)]
    # 47/60, which is 1/20 below the chance of acceptance.
    np.testing.assert_allclose(rows.accept_prob, 47 / 60, rtol=1e-6)
    law, rows = emitted_law(p, q, 1.0, 60)
    assert law == [Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)]
    np.testing.assert_allclose(rows.accept_prob, 5 / 6, rtol=1e-6)
    known = golden("one_position_exact")
    assert "19/39" in str(known)


def inside(law, p, alpha, total):
    eps = 1 - Fraction(alpha).limit_denominator(1000)
    shares = [Fraction(int(x), total) for x in p]
    return all(
        a <= (1 + eps) * s and a >= s - eps / (1 + eps)
        for a, s in zip(law, shares, strict=True)
    )


def rounded_down(p, q, *args, alpha, total, **options):
    """alpha q rounded down: one unit of every token may be too much."""
    spared = q - jnp.floor(q.astype(jnp.float32) * alpha).astype(jnp.int32)
    low = penalised.verify_rows(p, q, *args, alpha=1.0, total=total, **options)
    residual = jnp.maximum(p - q + spared, 0)
    words = args[-1]
    token = penalised.locate(residual, penalised.scaled(words, residual.sum(1)))
    return low._replace(token=jnp.where(low.accept, low.token, token))


def test_the_bound_holds_and_needs_rounding_up(rng):
    total = 60
    pairs = rng.integers(0, len(SIXTHS), (40, 2))
    outside = 0
    for a, b in pairs:
        p, q = SIXTHS[a] * 10, SIXTHS[b] * 10
        law, _ = emitted_law(p, q, 0.99, total)
        assert inside(law, p, 0.99, total)
        law, _ = emitted_law(p, q, 0.99, total, rounded_down)
        outside += not inside(law, p, 0.99, total)
    assert outside


def test_a_draft_that_was_not_drawn_is_replaced_by_its_own_point():
    """Its offset lies behind its interval, or it is no token; the words are unused."""
    p, q = (jnp.asarray([row] * 4, jnp.int32) for row in ([3, 2, 1], [2, 3, 1]))
    words = jnp.zeros((4, 2), jnp.uint32)
    ids = jnp.asarray([1, 1, -1, 1], jnp.int32)
    offsets = jnp.asarray([3, 2, 3, 0], jnp.int32)
    verify = jnp.asarray([True, True, True, False])
    points = jnp.full(4, 5, jnp.int32)
    rows = judge(
        penalised.verify_rows, 1.0, 6, p, q, ids, offsets, verify, points, words
    )
    assert rows.accept.tolist() == [False, False, False, True]
    # The second was drawn and falls; the residual is all on the first token.
    assert rows.token.tolist() == [1, 0, 1, 2]
    np.testing.assert_allclose(rows.accept_prob, [5 / 6, 5 / 6, 5 / 6, 1], rtol=1e-6)


def test_split_vocabulary_changes_no_bit(rng, vocab_mesh):
    def step(p, q, ids, offsets, verify, points, words, axis_name=None):
        return penalised.verify_rows(
            p, q, ids, offsets, verify, points, words,
            alpha=0.9, total=1000, axis_name=axis_name,
        )  # fmt: skip

    def many(share):
        return rng.multinomial(1000, rng.dirichlet(np.full(24, share)), 64)

    p, q = (jnp.asarray(many(share), jnp.int32) for share in (0.3, 0.5))
    points = jnp.asarray(rng.integers(0, 1000, (2, 64)), jnp.int32)
    ids, offsets = jax.jit(locate_offset)(q, points[0])
    words = jnp.asarray(rng.integers(0, 2**32, (64, 2), np.uint64), jnp.uint32)
    args = (p, q, ids, offsets, jnp.arange(64) % 4 != 3, points[1], words)
    wide, narrow = jax.P(None, "vocab"), jax.P()
    split = jax.shard_map(
        functools.partial(step, axis_name="vocab"),
        mesh=vocab_mesh,
        in_specs=(wide, wide, *[narrow] * 5),
        out_specs=narrow,
    )
    expected = jax.jit(step)(*args)
    assert not np.asarray(expected.accept).all()
    for a, b in zip(jax.jit(split)(*args), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("limit", [1, 3, 6, 2**30, 2**31 - 1])
def test_points_of_64_bits_are_exact(limit, rng):
    words = rng.integers(0, 2**32, (1000, 2), np.uint64)
    got = penalised.scaled(
        jnp.asarray(words, jnp.uint32), jnp.full(1000, limit, jnp.int32)
    )
    exact = [((int(a) << 32 | int(b)) * limit) >> 64 for a, b in words]
    np.testing.assert_array_equal(got, exact)
