"""Distributions as integer rows that sum to exactly `total`.

What "lossless" means in this library is relative to such a row, exactly. The row is
within 2.5e-5 of the float softmax in total variation on usual rows of 150k tokens,
and at most V * 2^-31 + 2e-6 away from it; bfloat16 logits move it a hundred times
more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.fixed_point import (
    NEVER,
    exponents,
    high_word,
    part,
    powers,
    reciprocal,
    total_power,
)
from pallas_kernels.vocab_axis import lowest_id, row_max, row_sum, token_ids

TOTAL = 1 << 30


def integer_rows(
    logits: jax.Array,
    scale: jax.Array,
    *,
    total: int = TOTAL,
    axis_name: str | None = None,
) -> jax.Array:
    """Softmax in units of 1 / total.

    Every weight is its share rounded to the nearest unit; where a row is so flat
    that roundings could outweigh its top token, they are cut instead. What is left
    to `total`, positive or negative, goes to the top token: the lowest id whose
    exponent is maximal.

    Args:
      logits: float32[R, V]. -inf excludes a token: its weight is exactly 0.
      scale: float32[R], from `fixed_point.scale_of`; 0 means a one-hot at the
        argmax, the lowest id on ties.
      total: static, 1 .. 2^30. The units of a row.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      int32[R, V], at least 0, each row summing to `total`; a row that holds NaN or
      +inf or nothing but -inf is all zero.

    Raises:
      ValueError: `total` or `V` out of range.
    """
    if not 1 <= total <= TOTAL:
        raise ValueError(f"`total` is {total}; allowed: 1 .. 2^30")
    width = full_width(logits, axis_name)
    power = row_powers(logits, scale, axis_name)
    return weights_of(power, width, total=total, axis_name=axis_name)


def full_width(x: jax.Array, axis_name: str | None = None) -> int:
    """Tokens of a whole row; ValueError if there are too many for exact sums."""
    shares = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    width = x.shape[1] * shares
    if not 0 < width < 1 << 20:
        raise ValueError(f"rows have {width} tokens; allowed: 1 .. 2^20 - 1")
    return width


def row_powers(
    logits: jax.Array, scale: jax.Array, axis_name: str | None = None
) -> jax.Array:
    """Unnormalised shares: 2^31 at the top tokens, 0 where a token is excluded.

    Args:
      logits: as for `integer_rows`.
      scale: as for `integer_rows`.
      axis_name: as for `integer_rows`.

    Returns:
      uint32[R, V]; a row without a law is all zero.
    """
    logits = logits.astype(jnp.float32)
    top = row_max(logits, axis_name)
    usable = jnp.isfinite(top)
    top = jnp.where(usable, top, 0.0)
    ids = token_ids(logits.shape[1], axis_name)
    first = lowest_id(logits == top[:, None], axis_name)
    greedy_loser = (scale == 0)[:, None] & (ids != first[:, None])
    excluded = greedy_loser | ~usable[:, None]
    exponent = jnp.where(excluded, NEVER, exponents(logits, top, scale))
    # Behind the barriers nothing is computed anew for every reader.
    return _barrier(powers(_barrier(exponent)))


def weights_of(
    power: jax.Array,
    width: int,
    *,
    total: int = TOTAL,
    axis_name: str | None = None,
) -> jax.Array:
    """Normalises shares to weights that sum to `total`; see `integer_rows`.

    Args:
      power: uint32[R, V] of `row_powers`, or 0 for tokens that are cut; not for a
        row's top tokens.
      width: static. Tokens of a whole row.
      total: as for `integer_rows`.
      axis_name: as for `integer_rows`.

    Returns:
      int32[R, V].
    """
    high, low = total_power(power, axis_name)
    usable = high > 0
    # A usable row has Z >= 2^31; others get that, to stay in range.
    inverse, places = reciprocal(jnp.maximum(high, jnp.uint32(1 << 11)), low)
    best = jnp.full_like(inverse, 1 << 31)
    nearest = 2 * _units(best, inverse, places, total, usable) > width
    weights = _barrier(
        _units(power, inverse[:, None], places[:, None], total, nearest[:, None])
    )
    rest = total - row_sum(weights, axis_name)
    ids = token_ids(power.shape[1], axis_name)
    taker = lowest_id(power == jnp.uint32(1 << 31), axis_name)[:, None]
    return weights + jnp.where(ids == taker, rest[:, None], 0)


def points(words: jax.Array, total: int = TOTAL) -> jax.Array:
    """Integer points of a row from random words.

    Args:
      words: uint32[...]. Uniform.
      total: static. A power of two gives every point the same number of words.

    Returns:
      int32[...] in [0, total).
    """
    return high_word(words, jnp.full_like(words, total)).astype(jnp.int32)


def _barrier(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x)


def _units(
    power: jax.Array,
    inverse: jax.Array,
    places: jax.Array,
    total: int,
    nearest: jax.Array,
) -> jax.Array:
    """int32, power / Z in units of 1 / total, rounded to nearest or cut."""
    spare = 32 - total.bit_length()
    factor = jnp.full_like(power, total << spare)
    # One bit more than the quotient fills, so that there is always one to round.
    share = part(high_word(power, inverse) << 1, factor)
    # share = weight * 2^shift; small totals need shifts that no word has.
    shift = places - jnp.uint32(31 - spare)
    beyond = jnp.maximum(shift, jnp.uint32(31)) - jnp.uint32(31)
    shift = shift - beyond
    half = (jnp.uint32(1) << shift) >> 1
    share = (share >> beyond) + jnp.where(nearest, half, jnp.uint32(0))
    return (share >> shift).astype(jnp.int32)
