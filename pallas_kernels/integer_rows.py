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
    TOP_POWER,
    exponents,
    high_word,
    normaliser,
    powers,
    total_power,
    units,
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
    ids = token_ids(logits.shape[1], axis_name)
    first = lowest_id(logits == top[:, None], axis_name)
    exponent = token_exponents(
        logits, ids, top[:, None], first[:, None], scale[:, None]
    )
    # Behind the barriers nothing is computed anew for every reader.
    return _barrier(powers(_barrier(exponent)))


def token_exponents(
    logits: jax.Array,
    ids: jax.Array,
    top: jax.Array,
    first: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """Exponents of tokens, given what has to be known of their row.

    Args:
      logits: float32[...].
      ids: int32[...], global.
      top: float32[...]. Maximum of the row, +inf if it holds NaN.
      first: int32[...]. Lowest id that has the maximum.
      scale: float32[...]. As for `integer_rows`.

    Returns:
      int32[...], at most 0; `NEVER` for every token of a row without a law.
    """
    usable = jnp.abs(top) < jnp.inf
    # Ids that may have a share: all, only the first of a greedy row, or none.
    lowest = jnp.where(scale == 0, first, 0)
    highest = jnp.where(scale == 0, first, jnp.iinfo(jnp.int32).max)
    highest = jnp.where(usable, highest, -1)
    exponent = exponents(logits, jnp.where(usable, top, 0.0), scale)
    return jnp.where((ids >= lowest) & (ids <= highest), exponent, NEVER)


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
    row = normaliser(high[:, None], low[:, None], width, total)
    weights = _barrier(units(power, row, total))
    rest = total - row_sum(weights, axis_name)
    ids = token_ids(power.shape[1], axis_name)
    taker = lowest_id(power == jnp.uint32(TOP_POWER), axis_name)[:, None]
    return weights + jnp.where(ids == taker, rest[:, None], 0)


def points(words: jax.Array, total: int = TOTAL) -> jax.Array:
    """Integer points of a row from random words.

    Args:
      words: uint32[...]. Uniform.
      total: static. A power of two gives every point the same number of words.

    Returns:
      int32[...] in [0, total).
    """
    return high_word(words, jnp.uint32(total)).astype(jnp.int32)


def _barrier(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x)
