"""Position-addressed key/value storage, so that nothing ever rolls back.

A cache is `{kind: {"k": store, "v": store}}` where a store is one array a
layer (a tuple) or, for stacked layers, one array with a leading layer axis.
Each array is `[B, K, slots, d]`: position p of a request lies in slot p. Rows
past the committed length are garbage that no mask lets through; slots past the
capacity take the tail of a block that begins at the last usable position (see
`attention.slots_for`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.config import DecoderConfig
from dspark_jax.models.attention import slots_for
from dspark_jax.models.params import Axes

Cache = dict[str, dict[str, Any]]


def empty_cache(
    config: DecoderConfig,
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    stacked: bool,
) -> Cache:
    """Zeros for `batch` requests of up to `capacity` positions."""
    cache: Cache = {}
    for kind in config.kinds:
        geometry = config.attention(kind)
        count = config.layer_types.count(kind)
        slots = slots_for(capacity)
        shape = (batch, geometry.num_kv_heads, slots, geometry.head_dim)

        def store(shape=shape, count=count):
            if stacked:
                return jnp.zeros((count, *shape), dtype)
            return tuple(jnp.zeros(shape, dtype) for _ in range(count))

        cache[kind] = {"k": store(), "v": store()}
    return cache


def cache_bytes(
    config: DecoderConfig, batch: int, capacity: int, dtype: jnp.dtype
) -> int:
    """Bytes of a cache, the slots past the capacity included."""
    per_position = sum(
        2 * geometry.num_kv_heads * geometry.head_dim
        for geometry in (config.attention(kind) for kind in config.layer_types)
    )
    return batch * slots_for(capacity) * per_position * jnp.dtype(dtype).itemsize


def write_rows(cache: Cache, rows: Cache, start: jax.Array) -> Cache:
    """Writes each request's block at its own position.

    Args:
      cache: see the module.
      rows: the same structure with `[B, K, T, d]` arrays.
      start: int32[B]. First slot of each request's block; start + T must not
        pass the last slot, as the write would shift back over valid rows.

    Returns:
      The cache with slots start .. start + T - 1 replaced.
    """

    def write(into: jax.Array, block: jax.Array) -> jax.Array:
        block = block.astype(into.dtype)
        if into.ndim == 5:
            return jax.vmap(write)(into, block)
        if into.shape[0] == 1:
            zero = jnp.zeros((), jnp.int32)
            at = (zero, zero, start[0], zero)
            return jax.lax.dynamic_update_slice(into, block, at)
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
        return jax.vmap(put)(into, block, start)

    return jax.tree.map(write, cache, rows)


def cache_axes(leaf: Any) -> Axes:
    """Logical axes of a leaf `[B, K, slots, d]`, behind a layer axis when stacked."""
    lead = (None,) * (leaf.ndim - 4)
    return (*lead, "batch", "cache_heads", None, None)


def longer(cache: Cache, capacity: int, more: int) -> Cache:
    """A cache of `capacity` positions with room for `more`."""
    extra = slots_for(more) - slots_for(capacity)

    def one(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, extra), (0, 0)])

    return jax.tree.map(one, cache)


def cut(cache: Cache, place: jax.Array, start: jax.Array, size: int) -> Cache:
    """Positions `start` .. `start + size - 1` of the request in a place."""

    def read(full: jax.Array) -> jax.Array:
        at: list[Any] = [0] * full.ndim
        shape = list(full.shape)
        at[-4], at[-2] = place, start
        shape[-4], shape[-2] = 1, size
        return jax.lax.dynamic_slice(full, at, shape)

    return jax.tree.map(read, cache)


def put(cache: Cache, part: Cache, place: jax.Array) -> Cache:
    """Writes what `cut` gave to a request's first positions; the excess is cut off."""

    def write(full: jax.Array, part: jax.Array) -> jax.Array:
        part = part[..., : full.shape[-2], :]
        at: list[Any] = [0] * full.ndim
        at[-4] = place
        return jax.lax.dynamic_update_slice(full, part, at)

    return jax.tree.map(write, cache, part)
