"""Drawing, in floats and integers, and the search on cumulative weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.locate import locate
from pallas_kernels.verify import textbook

draw = jax.jit(textbook.draw)
jitted_locate = jax.jit(locate)

LAST_WORD = np.uint32(2**32 - 1)


def test_uniform_ends_and_step():
    words = jnp.asarray([0, 255, 256, 2**31, LAST_WORD], jnp.uint32)
    expected = np.asarray([0, 0, 2.0**-24, 0.5, 1 - 2.0**-24], np.float32)
    np.testing.assert_array_equal(textbook.uniform(words), expected)
    assert textbook.uniform(words).dtype == jnp.float32


@pytest.mark.parametrize("width", [1, 3, 100, 256, 257, 1000, 5000])
def test_draw_follows_cumulative_sum(width, rng):
    probs = rng.random((16, width)).astype(np.float32)
    probs[:, rng.random(width) < 0.5] = 0
    probs[:, rng.integers(width)] = 0.7
    u = rng.random(16).astype(np.float32)
    token = np.asarray(draw(jnp.asarray(probs), jnp.asarray(u)))
    assert token.dtype == np.int32
    ends = np.cumsum(probs.astype(np.float64), axis=1)
    point = u * ends[:, -1]
    rows = np.arange(16)
    slack = 1e-5 * ends[:, -1]
    assert np.all(ends[rows, token] > point - slack)
    assert np.all(ends[rows, token] - probs[rows, token] <= point + slack)
    assert np.all(probs[rows, token] > 0)


def test_draw_law_is_the_row(measured_law, rng):
    probs = rng.dirichlet(np.full(7, 0.5), size=5).astype(np.float32)

    def tokens(words):
        p = jnp.repeat(jnp.asarray(probs), 7, axis=0)
        return draw(p, textbook.uniform(jnp.asarray(words).reshape(-1))).reshape(5, 7)

    np.testing.assert_allclose(measured_law(tokens, 5, 7), probs, atol=2e-7)


def test_draw_never_gives_a_token_without_probability(rng):
    # Rows whose float sum rounds below the sum of a part, and the two end points.
    width = 3000
    probs = np.where(rng.random((64, width)) < 0.01, rng.random((64, width)), 0)
    probs = (probs / probs.sum(1, keepdims=True)).astype(np.float32)
    for u in (0.0, 1 - 2.0**-24):
        token = np.asarray(draw(jnp.asarray(probs), jnp.full(64, u, jnp.float32)))
        assert np.all(probs[np.arange(64), token] > 0)
        expected = [np.flatnonzero(row)[0 if u == 0 else -1] for row in probs]
        np.testing.assert_array_equal(token, expected)


def test_draw_at_every_end_of_a_token(rng):
    # Points that equal partial sums up to an ulp, where a float prefix sum may step
    # over a token of probability zero.
    width = 600
    row = np.where(rng.random(width) < 0.5, rng.random(width), 0).astype(np.float32)
    points = np.cumsum(row, dtype=np.float32)
    near = np.concatenate([points, np.nextafter(points, 0), np.nextafter(points, 9)])
    weights = jnp.broadcast_to(jnp.asarray(row), (len(near), width))
    token = np.asarray(jitted_locate(weights, jnp.asarray(near)))
    assert np.all(row[token] > 0)


def test_draw_row_need_not_be_normalised(rng):
    probs = jnp.asarray(rng.random((8, 50)), jnp.float32)
    u = jnp.asarray(rng.random(8), jnp.float32)
    np.testing.assert_array_equal(draw(probs, u), draw(probs * 4, u))


def test_draw_from_an_empty_row_gives_minus_one():
    probs = jnp.asarray([[0, 0, 0], [0, 1, 0], [jnp.nan, 1, 0]], jnp.float32)
    token = draw(probs, jnp.full(3, 0.5, jnp.float32))
    np.testing.assert_array_equal(token, [-1, 1, -1])


def test_locate_in_integers(rng):
    weights = rng.integers(0, 3, (40, 700)).astype(np.int32)
    point = rng.integers(0, weights.sum(1)).astype(np.int32)
    token = locate(jnp.asarray(weights), jnp.asarray(point))
    expected = (np.cumsum(weights, 1) > point[:, None]).argmax(1)
    np.testing.assert_array_equal(token, expected)


def test_draw_does_not_depend_on_other_rows(rng):
    probs = rng.dirichlet(np.full(1000, 0.1), size=13).astype(np.float32)
    u = rng.random(13).astype(np.float32)
    whole = np.asarray(draw(probs, u))
    order = rng.permutation(13)
    np.testing.assert_array_equal(draw(probs[order], u[order]), whole[order])
    for n in (1, 2, 5):
        np.testing.assert_array_equal(draw(probs[:n], u[:n]), whole[:n])


@pytest.mark.parametrize("width", [1, 3, 256, 700, 5000])
def test_integer_draw_gives_token_and_offset(width, rng):
    rows = rng.multinomial(2**30, rng.dirichlet(np.full(width, 0.3)), 40)
    point = np.concatenate([[0, 2**30 - 1], rng.integers(0, 2**30, 38)])
    ids, offsets = jax.jit(pk.draw)(
        jnp.asarray(rows, jnp.int32), jnp.asarray(point, jnp.int32)
    )
    ends = np.cumsum(rows, 1)
    expected = (ends > point[:, None]).argmax(1)
    np.testing.assert_array_equal(ids, expected)
    start = (ends - rows)[np.arange(40), expected]
    np.testing.assert_array_equal(offsets, point - start)
