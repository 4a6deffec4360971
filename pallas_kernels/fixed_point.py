"""Arithmetic in 32-bit integers, so that every device computes the same bits.

Floating-point `exp` and division differ between devices, and float sums depend on
their order. Here a logit becomes an integer exponent by one subtraction, one
multiplication and one conversion, each exactly rounded; everything behind it is
integer arithmetic, and sums are exact in any order.

    exponent   log2 units with 20 fraction bits, <= 0
    power      2^exponent in units of 2^-31, so at most 2^31
    Z          sum of powers as (high, low): high * 2^20 + low
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.vocab_axis import as_tiles

# Below this temperature a row means its argmax.
GREEDY_BELOW = 1e-5
# Exponent units of one octave, and the word that holds the low part of a sum.
OCTAVE = 1 << 20
LOW = OCTAVE - 1
# Power of a row's top tokens.
TOP_POWER = 1 << 31
# Exponents this far below the maximum have power 0.
NEVER = -(1 << 29)
# 2^-f on [0, 1] as an alternating polynomial of f, in units of 2^-31: least maximum
# error (3.4 units) among those of degree 6 that are exact at both ends.
_COEFFICIENTS = (
    1 << 31,
    1_488_522_025,
    515_878_398,
    119_167_556,
    20_574_879,
    2_740_586,
    235_067,
)


def scale_of(temperature: np.ndarray, *, engine_greedy: bool = False) -> np.ndarray:
    """Exponent units of one logit at a temperature, rounded once.

    Computed on the host, as division is not correctly rounded on every device.

    Args:
      temperature: float[...], at least 0.
      engine_greedy: the reference engine's rule instead: temperatures below 1e-5
        count as 1e-5, at which logits less than about 1e-4 apart are still drawn.

    Returns:
      float32[...], log2(e) / temperature * 2^20; 0 below 1e-5, which means the
      argmax.
    """
    warm = np.asarray(temperature, np.float64)
    if engine_greedy:
        warm = np.maximum(warm, GREEDY_BELOW)
    greedy = warm < GREEDY_BELOW
    units = math.log2(math.e) * OCTAVE / np.where(greedy, 1.0, warm)
    return np.where(greedy, 0.0, units).astype(np.float32)


def high_word(a: jax.Array, b: jax.Array) -> jax.Array:
    """Upper 32 bits of the 64-bit product of two uint32, from 16-bit products."""
    half = jnp.uint32(0xFFFF)
    a_low, a_high, b_low, b_high = a & half, a >> 16, b & half, b >> 16
    cross, other = a_high * b_low, a_low * b_high
    middle = ((a_low * b_low) >> 16) + (cross & half) + (other & half)
    return a_high * b_high + (cross >> 16) + (other >> 16) + (middle >> 16)


def part(a: jax.Array, b: jax.Array) -> jax.Array:
    """`high_word` less the carry of the low parts: cheaper, and 0 to 2 too small."""
    half = jnp.uint32(0xFFFF)
    a_low, a_high, b_low, b_high = a & half, a >> 16, b & half, b >> 16
    return a_high * b_high + ((a_high * b_low) >> 16) + ((a_low * b_high) >> 16)


def exponents(logits: jax.Array, top: jax.Array, scale: jax.Array) -> jax.Array:
    """Exponents of logits below a maximum.

    The maximum is subtracted before scaling: at low temperatures scaled logits
    would leave the range, their differences only where the power is 0 anyhow.

    Args:
      logits: float32[...]. -inf has power 0.
      top: float32[...]. Finite, at least every logit of the row.
      scale: float32[...], see `scale_of`.

    Returns:
      int32[...], trunc((logit - top) * scale), at least -2^29.
    """
    scaled = (logits - top) * scale
    return jnp.clip(scaled, float(NEVER), 0.0).astype(jnp.int32)


def powers(exponent: jax.Array) -> jax.Array:
    """2^exponent, truncated.

    A polynomial of the fraction in Horner's form, shifted by the whole octaves; off
    by at most 8 units, and never rising where the exponent falls.

    Args:
      exponent: int32[...], at most 0.

    Returns:
      uint32[...] in units of 2^-31.
    """
    below = (-exponent).astype(jnp.uint32)
    octaves = below >> 20
    fraction = (below & jnp.uint32(LOW)) << 12
    value = jnp.uint32(_COEFFICIENTS[-1])
    for coefficient in _COEFFICIENTS[-2::-1]:
        value = jnp.uint32(coefficient) - part(value, fraction)
    shifted = value >> jnp.minimum(octaves, jnp.uint32(31))
    return jnp.where(octaves > 31, jnp.uint32(0), shifted)


def total_power(
    power: jax.Array, axis_name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """The exact sum of each row.

    Args:
      power: uint32[R, V], at most 2^31 each, V below 2^20 over all shares.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      (high, low), uint32[R] each: high * 2^20 + low with low < 2^20.
    """
    tiles = as_tiles(power)
    high, low = (tiles >> 20).sum(-1), (tiles & jnp.uint32(LOW)).sum(-1)
    high, low = carry(high, low)
    high, low = carry(high.sum(-1), low.sum(-1))
    if axis_name is not None:
        high, low = carry(*jax.lax.psum((high, low), axis_name))
    return high, low


def carry(high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same number, high * 2^20 + low, with low below 2^20."""
    return high + (low >> 20), low & jnp.uint32(LOW)


def reciprocal(high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """2^n / Z with 32 significant bits.

    Z is cut to its leading 32 bits; Newton's iteration in integers does the rest.
    The result is within four units of the last place.

    Args:
      high: uint32[...], at least 2^11.
      low: uint32[...], below 2^20.

    Returns:
      (r, n): uint32[...] each, so that high_word(e, r) is e / Z in units of
      2^-n, 31 <= n <= 51.
    """
    length = jnp.uint32(32) - jax.lax.clz(high)
    leading = (high << (jnp.uint32(32) - length)) | (low >> (length - jnp.uint32(12)))
    # With D = leading / 2^32 in [1/2, 1): x = X * 2^31, X from 48/17 - 32/17 D to
    # 1/D. The first value is off by a 17th, every step squares the error.
    slope = jnp.uint32(round(32 / 17 * 2**31))
    x = jnp.uint32(round(48 / 17 * 2**30)) - (high_word(leading, slope) >> 1)
    x = x << 1
    one = jnp.uint32(1 << 31)
    for _ in range(3):
        product = high_word(leading, x)
        under = product <= one
        error = jnp.where(under, one - product, product - one)
        change = high_word(x, error << 1)
        # X <= 2: the largest value stands for it.
        up = jnp.where(x > ~change, jnp.uint32(0xFFFFFFFF), x + change)
        x = jnp.where(under, up, x - change)
    return x, length + jnp.uint32(19)


class Normaliser(NamedTuple):
    """What turns the powers of a row into weights.

    inverse, places: 1 / Z, see `reciprocal`.
    nearest: whether weights are rounded to the nearest unit, or cut.
    """

    inverse: jax.Array
    places: jax.Array
    nearest: jax.Array


def normaliser(high: jax.Array, low: jax.Array, width: int, total: int) -> Normaliser:
    """The normaliser of rows whose powers sum to Z.

    Args:
      high: uint32[...], see `total_power`. A row without a law has 0.
      low: uint32[...].
      width: static. Tokens of a whole row.
      total: static, 1 .. 2^30. The units of a row.
    """
    usable = high > 0
    # A usable row has Z >= 2^31; others get that, to stay in range.
    inverse, places = reciprocal(jnp.maximum(high, jnp.uint32(1 << 11)), low)
    # So flat that roundings could outweigh the top token: then weights are cut.
    best = units(jnp.uint32(TOP_POWER), Normaliser(inverse, places, usable), total)
    return Normaliser(inverse, places, 2 * best > width)


def units(power: jax.Array, row: Normaliser, total: int) -> jax.Array:
    """power / Z in units of 1 / total.

    Args:
      power: uint32[...] of `powers`.
      row: of the same row.
      total: as for `normaliser`.

    Returns:
      int32[...].
    """
    spare = 32 - total.bit_length()
    factor = jnp.uint32(total << spare)
    # One bit more than the quotient fills, so that there is always one to round.
    share = part(high_word(power, row.inverse) << 1, factor)
    # share = weight * 2^shift; small totals need shifts that no word has.
    shift = row.places - jnp.uint32(31 - spare)
    beyond = jnp.maximum(shift, jnp.uint32(31)) - jnp.uint32(31)
    shift = shift - beyond
    half = (jnp.uint32(1) << shift) >> 1
    share = (share >> beyond) + jnp.where(row.nearest, half, jnp.uint32(0))
    return (share >> shift).astype(jnp.int32)
