"""Grouped-query attention over a cache and a block, with one order of summing.

The cache is only read; nothing of its size is copied or concatenated. Positions
are summed tile by tile: products inside a tile first, then the tiles in order.
Tiles that lie wholly below the block come from the cache. The few that the block
touches come from a window, a small copy of those tiles with the block's own rows
in place. A position is therefore summed in the same order whether it is already
cached or still in the block, and a row's result does not depend on where its
block began. That is what makes plain and speculative greedy decoding agree to
the bit, wherever matrix products do. On CPU, tiles that no request has reached
are not read.

    tile      0        1        2        3
    cache     pppppppp pppppppp ppp..... ........
    window                      pppbbbb. ........     b: rows of the block
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

NEG_INF = float("-inf")
SMALLEST_TILE = 64
MOST_TILES = 16
# Up to this batch, windows are cut request by request, which XLA on CPU does
# with plain copies; a gather serves larger ones.
CUT_ONE_BY_ONE = 4


def tile_size(capacity: int) -> int:
    """Positions summed together, for caches of `capacity` positions."""
    tile = SMALLEST_TILE
    while tile * MOST_TILES < capacity:
        tile *= 2
    return tile


def slots_for(capacity: int) -> int:
    """Slots that a cache of `capacity` positions needs.

    The slack holds the window of a block of up to a tile that begins at any
    usable position.
    """
    tile = tile_size(capacity)
    return -(-capacity // tile) * tile + 2 * tile


def window_tiles(width: int, tile: int) -> int:
    """Tiles that a block of `width` rows may touch."""
    return -(-(tile - 1 + width) // tile)


def block_fits(start: int, width: int, capacity: int, slots: int) -> bool:
    """Whether a block that begins at `start` keeps its window inside the cache."""
    tile = tile_size(capacity)
    return start // tile * tile + window_tiles(width, tile) * tile <= slots


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["start", "window_start", "cache_mask", "window_mask"],
    meta_fields=["tile"],
)
@dataclass(frozen=True)
class Layout:
    """Where a step's blocks lie, and what their rows see.

    Attributes:
      start: int32[B]. Position of each block's first row.
      window_start: int32[B]. First position of its window, a multiple of the
        tile.
      cache_mask: bool[B, C / tile, T, tile]. Positions read from the cache.
      window_mask: bool[B, W / tile, T, tile]. Positions read from the window.
      tile: static.
    """

    start: jax.Array
    window_start: jax.Array
    cache_mask: jax.Array
    window_mask: jax.Array
    tile: int


def layout(
    start: jax.Array,
    width: int,
    slots: int,
    tile: int,
    sliding: int | None,
    causal: bool,
) -> Layout:
    """The layout of blocks of `width` rows.

    Args:
      start: int32[B].
      width: T.
      slots: C, a multiple of `tile`.
      tile: positions summed together.
      sliding: visible positions including the row's own, or None.
      causal: rows see themselves and earlier rows of the block; otherwise the
        whole block (draft backbone).
    """
    window_start = start // tile * tile
    query = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    query = query[:, None, :, None]

    def visible(key: jax.Array) -> jax.Array:
        if sliding is None:
            return jnp.ones(jnp.broadcast_shapes(query.shape, key.shape), bool)
        return query - key < sliding

    key = jnp.arange(slots, dtype=jnp.int32).reshape(1, -1, 1, tile)
    below = key < window_start[:, None, None, None]
    count = window_tiles(width, tile)
    offset = jnp.arange(count * tile, dtype=jnp.int32).reshape(1, count, 1, tile)
    own = window_start[:, None, None, None] + offset
    last = query if causal else start[:, None, None, None] + (width - 1)
    return Layout(
        start=start,
        window_start=window_start,
        cache_mask=below & visible(key),
        window_mask=(own <= last) & visible(own),
        tile=tile,
    )


@functools.partial(jax.jit, static_argnames="scale")
def block_attention(
    q: jax.Array,
    block_k: jax.Array,
    block_v: jax.Array,
    cache_k: jax.Array,
    cache_v: jax.Array,
    at: Layout,
    scale: float,
) -> jax.Array:
    """Attention of block queries over the cache and the block.

    Args:
      q: float32[B, T, N, d]. Queries after norm and rotation.
      block_k: float32[B, K, T, d]. Keys of the block, K key/value heads.
      block_v: as block_k.
      cache_k: [B, K, C, d]. Committed keys; unread where the mask is False.
      cache_v: as cache_k. Must be finite everywhere, as 0 * NaN is NaN.
      at: see `layout`.
      scale: factor on the scores.

    Returns:
      float32[B, T, N, d].
    """
    args = (q, block_k, block_v, cache_k, cache_v, at)
    tiles = cache_k.shape[2] // at.tile

    def first(count: int) -> Callable[..., jax.Array]:
        return functools.partial(_attend, scale=scale, tiles=count)

    def as_needed(*args: Any) -> jax.Array:
        counts = [count for count in (tiles // 4, tiles // 2) if count > 1] + [tiles]
        needed = jnp.max(at.window_start) // at.tile
        beyond = [(needed > count).astype(jnp.int32) for count in counts[:-1]]
        return jax.lax.switch(sum(beyond), [first(count) for count in counts], *args)

    # A choice at run time would make an accelerator wait for its host.
    return jax.lax.platform_dependent(*args, cpu=as_needed, default=first(tiles))


@functools.partial(jax.jit, static_argnames=("scale", "tiles"))
def _attend(
    q: jax.Array,
    block_k: jax.Array,
    block_v: jax.Array,
    cache_k: jax.Array,
    cache_v: jax.Array,
    at: Layout,
    *,
    scale: float,
    tiles: int,
) -> jax.Array:
    """`block_attention` that reads the first `tiles` tiles of the cache only.

    More of them change no bit, as long as they are two or more: XLA on CPU
    multiplies single tiles in another order.
    """
    b, t, n, d = q.shape
    k = block_k.shape[1]
    rows = n // k * t
    grouped = q.reshape(b, t, k, n // k, d).transpose(0, 2, 3, 1, 4)
    grouped = (grouped * jnp.float32(scale)).reshape(b, k, 1, rows, d)

    def tiled(x: jax.Array) -> jax.Array:
        return x.reshape(b, k, -1, at.tile, d)

    def cached(x: jax.Array) -> jax.Array:
        return tiled(x[:, :, : tiles * at.tile])

    def scores(keys: jax.Array, mask: jax.Array) -> jax.Array:
        tiles = keys.shape[2]
        spread = jnp.broadcast_to(grouped, (b, k, tiles, rows, d))
        raw = _dot(spread, keys, 4).reshape(b, k, tiles, n // k, t, at.tile)
        return jnp.where(mask[:, None, :, None], raw, NEG_INF)

    on_cache = scores(cached(cache_k), at.cache_mask[:, :tiles])
    on_window = scores(tiled(_window(cache_k, block_k, at)), at.window_mask)
    top = jnp.maximum(
        jnp.max(on_cache, axis=(2, 5), keepdims=True),
        jnp.max(on_window, axis=(2, 5), keepdims=True),
    )

    def sums(logits: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Per tile: total weight [.., rows, 1] and weighed values [.., rows, d]."""
        weights = jnp.exp(logits - top).reshape(*values.shape[:3], rows, at.tile)
        return jnp.sum(weights, axis=-1, keepdims=True), _dot(weights, values, 3)

    old = sums(on_cache, cached(cache_v))
    new = sums(on_window, tiled(_window(cache_v, block_v, at)))
    total, mixed = (_in_order(*pair) for pair in zip(old, new, strict=True))
    out = (mixed / total).reshape(b, k, n // k, t, d)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, d)


def _in_order(cached: jax.Array, fresh: jax.Array) -> jax.Array:
    """The sum over tiles (axis 2), one after the other.

    The cache's tiles are exactly zero from where the window begins, as its mask
    ends there, so the window's tiles come next in position order.
    """
    parts = [cached[:, :, tile] for tile in range(cached.shape[2])]
    parts += [fresh[:, :, tile] for tile in range(fresh.shape[2])]
    return functools.reduce(jnp.add, parts)


def _window(cache: jax.Array, block: jax.Array, at: Layout) -> jax.Array:
    """[B, K, W, d]. The tiles that a block touches, with the block in place."""
    size = window_tiles(block.shape[2], at.tile) * at.tile
    block = block.astype(cache.dtype)
    batch, heads, _, d = cache.shape
    offset = at.start - at.window_start
    zero = jnp.zeros((), jnp.int32)
    if batch <= CUT_ONE_BY_ONE:
        windows = []
        for row in range(batch):
            corner = (jnp.int32(row), zero, at.window_start[row], zero)
            window = jax.lax.dynamic_slice(cache, corner, (1, heads, size, d))
            inner = (zero, zero, offset[row], zero)
            windows.append(
                jax.lax.dynamic_update_slice(window, block[row : row + 1], inner)
            )
        return windows[0] if batch == 1 else jnp.concatenate(windows)

    def cut(cache, block, window_start, offset):
        window = jax.lax.dynamic_slice_in_dim(cache, window_start, size, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(window, block, offset, axis=1)

    return jax.vmap(cut)(cache, block, at.window_start, offset)


def _dot(x: jax.Array, y: jax.Array, contract: int) -> jax.Array:
    """Product per (request, head, tile); y's axis `contract` is summed."""
    exact = jax.lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    batched = (0, 1, 2)
    return jax.lax.dot_general(
        x.astype(y.dtype),
        y,
        (((4,), (contract,)), (batched, batched)),
        precision=exact,
        preferred_element_type=jnp.float32,
    )
