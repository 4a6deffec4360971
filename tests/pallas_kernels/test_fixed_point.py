"""Integer arithmetic against exact numbers."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fixed_point


def words(rng, count: int) -> tuple[np.ndarray, np.ndarray]:
    edges = np.asarray([0, 1, 0xFFFF, 0x10000, 2**31, 2**32 - 1], np.uint64)
    free = rng.integers(0, 2**32, count, np.uint64)
    return np.concatenate([np.repeat(edges, 6), free]), np.concatenate(
        [np.tile(edges, 6), rng.integers(0, 2**32, count, np.uint64)]
    )


def test_products(rng):
    a, b = words(rng, 50_000)
    exact = (a * b) >> np.uint64(32)
    given = jnp.asarray(a, jnp.uint32), jnp.asarray(b, jnp.uint32)
    np.testing.assert_array_equal(fixed_point.high_word(*given), exact)
    short = exact - np.asarray(fixed_point.part(*given)).astype(np.uint64)
    assert short.max() == 2


def test_powers_of_every_fraction():
    exponent = -np.arange(2**20 + 3, dtype=np.int32)
    power = np.asarray(jax.jit(fixed_point.powers)(exponent)).astype(np.float64)
    assert np.abs(power - 2.0 ** (31 + exponent / 2**20)).max() < 8
    assert (np.diff(power) <= 0).all(), "a larger logit must not weigh less"
    assert power[0] == 2**31 and power[2**20] == 2**30


def test_powers_far_down():
    octaves = np.asarray([30, 31, 32, 33, 511, 512])
    exponent = jnp.asarray(-octaves * 2**20, jnp.int32)
    np.testing.assert_array_equal(fixed_point.powers(exponent), [2, 1, 0, 0, 0, 0])


@pytest.mark.parametrize("width", [1, 255, 257, 5000])
def test_sums_are_exact(rng, width):
    power = rng.integers(0, 2**31 + 1, (3, width), np.uint64)
    high, low = fixed_point.total_power(jnp.asarray(power, jnp.uint32))
    found = np.asarray(high).astype(np.uint64) * 2**20 + np.asarray(low)
    np.testing.assert_array_equal(found, power.sum(1))
    assert (np.asarray(low) < 2**20).all()


@pytest.mark.slow
def test_the_largest_sum_fits():
    width = 2**20 - 1
    power = jnp.full((1, width), 2**31, jnp.uint32)
    high, low = fixed_point.total_power(power)
    assert int(high[0]) * 2**20 + int(low[0]) == width * 2**31


def test_reciprocals(rng):
    edges = [2**11, 2**11 + 1, 2**12 - 1, 2**12, 2**31]
    high = np.concatenate([2 ** rng.uniform(11, 31, 3000), edges]).astype(np.uint32)
    low = rng.integers(0, 2**20, len(high)).astype(np.uint32)
    low[-1] = 0
    r, n = fixed_point.reciprocal(jnp.asarray(high), jnp.asarray(low))
    for value, places, h, w in zip(*map(np.asarray, (r, n, high, low)), strict=True):
        z = int(h) * 2**20 + int(w)
        exact = Fraction(2 ** (int(places) + 32), z)
        assert abs(int(value) - exact) < 4
        assert 2**31 <= int(value) < 2**32 and 31 <= places <= 51


def test_scales_are_rounded_once():
    scale = fixed_point.scale_of(np.asarray([1.0, 0.7, 0.01, 9e-6, 0.0]))
    assert scale.dtype == np.float32
    exact = 1.4426950408889634 * 2**20 / np.asarray([1.0, 0.7, 0.01])
    np.testing.assert_array_equal(scale[:3], exact.astype(np.float32))
    np.testing.assert_array_equal(scale[3:], 0)


def test_exponents_subtract_before_they_scale():
    """Scaled first, logits of a cold row are clipped together and the law breaks."""
    logits = jnp.asarray([[40.0, 39.99, 39.0, -jnp.inf]])
    scale = jnp.asarray(fixed_point.scale_of(np.asarray([0.01])))
    right = fixed_point.exponents(logits, jnp.asarray([[40.0]]), scale[:, None])
    expected = np.log2(np.e) / 0.01 * 2**20 * np.asarray([0, -0.01, -1])
    np.testing.assert_allclose(right[0, :3], expected, rtol=1e-3)
    assert right[0, 3] == -(2**29)
    scaled = jnp.clip(logits * scale[:, None], -(2.0**29), 2.0**29)
    wrong = (scaled - scaled.max()).astype(jnp.int32)
    assert (wrong[0, :3] == 0).all()
