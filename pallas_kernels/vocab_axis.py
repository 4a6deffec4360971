"""Reductions along the vocabulary, whole or split over a mesh axis.

With `axis_name=None` these are plain reductions over the last axis. With a name they
are called inside `jax.shard_map`, each device holding a contiguous share of the
vocabulary, shares in mesh order; only `[R]` numbers travel between devices.
"""

import jax
import jax.numpy as jnp

TILE = 256


def as_tiles(x: jax.Array) -> jax.Array:
    """`x` [R, V] as [R, ceil(V / t), t], t = min(V, TILE), zeros behind the end."""
    rows, width = x.shape
    tile = min(width, TILE)
    short = -width % tile
    if short:
        x = jnp.pad(x, ((0, 0), (0, short)))
    return x.reshape(rows, -1, tile)


def token_ids(width: int, axis_name: str | None = None) -> jax.Array:
    """int32[1, width]. Global ids of this share's columns."""
    ids = jnp.arange(width, dtype=jnp.int32)[None, :]
    if axis_name is None:
        return ids
    return ids + jax.lax.axis_index(axis_name).astype(jnp.int32) * width


def fold(x: jax.Array) -> jax.Array:
    """Sum over the last axis, in an order that depends on its length alone.

    A compiler picks the order of a float reduction by the whole shape, so that one
    row would get other bits in another batch. Slices added elementwise leave it no
    choice. Integer sums are exact in any order.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.sum(-1)
    while (length := x.shape[-1]) > 1:
        count = min(length, 16)
        short = -length % count
        if short:
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])
        # The barrier keeps the levels, and what made `x`, out of one kernel with
        # hundreds of unrolled terms.
        x = jax.lax.optimization_barrier(x)
        parts = x.reshape(*x.shape[:-1], count, -1)
        x = sum((parts[..., i, :] for i in range(1, count)), parts[..., 0, :])
    return x[..., 0]


def row_sum(x: jax.Array, axis_name: str | None = None) -> jax.Array:
    """Sum of each row, [R]."""
    total = fold(fold(as_tiles(x)))
    return total if axis_name is None else jax.lax.psum(total, axis_name)


def row_max(x: jax.Array, axis_name: str | None = None) -> jax.Array:
    """Maximum of each row, [R]; a float row holding NaN gives +inf."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        # Neither a reduction nor a maximum across devices need pass NaN on.
        x = jnp.where(jnp.isnan(x), jnp.inf, x)
    top = x.max(1)
    return top if axis_name is None else jax.lax.pmax(top, axis_name)


def lowest_id(mask: jax.Array, axis_name: str | None = None) -> jax.Array:
    """int32[R]. Lowest global id whose mask is set; 2^31 - 1 where none is."""
    ids = token_ids(mask.shape[1], axis_name)
    first = jnp.where(mask, ids, jnp.iinfo(jnp.int32).max).min(1)
    return first if axis_name is None else jax.lax.pmin(first, axis_name)


def take(x: jax.Array, ids: jax.Array, axis_name: str | None = None) -> jax.Array:
    """`x[r, ids[r]]`, [R]; 0 for an id outside the vocabulary, as -1."""
    width = x.shape[1]
    local = ids
    if axis_name is not None:
        local = ids - jax.lax.axis_index(axis_name).astype(jnp.int32) * width
    inside = (local >= 0) & (local < width)
    index = jnp.clip(local, 0, width - 1)[:, None]
    value = jnp.take_along_axis(x, index, axis=1)[:, 0]
    value = jnp.where(inside, value, jnp.zeros_like(value))
    return value if axis_name is None else jax.lax.psum(value, axis_name)
