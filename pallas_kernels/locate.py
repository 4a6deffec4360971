"""Finding a point on the line of cumulative weights, level by level.

Shares of a split vocabulary, then tiles, then tokens: each level picks the first
part whose cumulative weight exceeds the point and hands down what is left of the
point. One pass over the row, and no prefix sum longer than a tile.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.vocab_axis import as_tiles, fold


def locate(
    weights: jax.Array, point: jax.Array, axis_name: str | None = None
) -> jax.Array:
    """Token in whose interval of cumulative weight a point lies, ids ascending.

    Only a token of positive weight is ever returned, whatever the rounding of the
    sums: a point at or behind the end gives the last such token.

    Args:
      weights: float32, int32 or uint32[R, V]. Not negative, and integer sums must fit.
      point: same dtype [R]. At least 0.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      int32[R], the lowest global id whose inclusive cumulative weight exceeds
      `point`; -1 for a row without positive weight.
    """
    return locate_offset(weights, point, axis_name)[0]


def locate_offset(
    weights: jax.Array, point: jax.Array, axis_name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """`locate`, and how far behind the start of the token's interval the point lies.

    Args:
      weights: as for `locate`.
      point: as for `locate`.
      axis_name: as for `locate`.

    Returns:
      (int32[R] as `locate`, offset [R] in the dtype of `point`).
    """
    tiles = as_tiles(weights)
    sums, width = fold(tiles), weights.shape[1]
    if axis_name is not None:
        shares = jax.lax.all_gather(fold(sums), axis_name, axis=1)
        share, point = _descend(shares, point)
    tile, point = _descend(sums, point)
    chosen = jnp.maximum(tile, 0)[:, None, None]
    inside = jnp.take_along_axis(tiles, chosen, axis=1)[:, 0]
    column, offset = _descend(inside, point)
    local = jnp.where(tile < 0, -1, tile * tiles.shape[2] + column)
    if axis_name is None:
        return local, offset
    # The sum leaves every device with the owner's answer; the shift by one lets
    # a row without an owner come out as -1.
    here = jax.lax.axis_index(axis_name).astype(jnp.int32)
    mine = share == here
    answer = jnp.where(mine, here * width + local + 1, 0)
    offset = jnp.where(mine, offset, jnp.zeros_like(offset))
    answer, offset = jax.lax.psum((answer, offset), axis_name)
    return answer - 1, offset


def _descend(weights: jax.Array, point: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First column [R] whose cumulative weight exceeds the point, and the rest."""
    count = weights.shape[1]
    columns = jnp.arange(count, dtype=jnp.int32)[None, :]
    ends = jnp.cumsum(weights, axis=1)
    # A parallel prefix sum of floats may move by an ulp across a zero weight, so
    # `ends > point` alone could pick a token that has none.
    filled = weights > 0
    first = jnp.where(filled & (ends > point[:, None]), columns, count).min(1)
    last = jnp.where(filled, columns, -1).max(1)
    column = jnp.where(first < count, first, last)
    previous = jnp.maximum(column - 1, 0)[:, None]
    start = jnp.take_along_axis(ends, previous, axis=1)[:, 0]
    start = jnp.where(column > 0, start, jnp.zeros_like(start))
    return column, jnp.maximum(point - start, jnp.zeros_like(point))
