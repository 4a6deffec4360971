"""Grouped-query attention over a cache and a block, without joining them.

Scores against committed positions (the cache) and against the rows being
evaluated (the block) are computed apart and meet in the softmax. The cache is
only read: nothing of its size is copied or concatenated.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

NEG_INF = float("-inf")


def joint_attention(
    q: jax.Array,
    block_k: jax.Array,
    block_v: jax.Array,
    cache_k: jax.Array,
    cache_v: jax.Array,
    block_mask: jax.Array,
    cache_mask: jax.Array,
    scale: float,
) -> jax.Array:
    """Attention of block queries over the cache and the block.

    Args:
      q: float32[B, T, N, d]. Queries after norm and rotation.
      block_k: float32[B, K, T, d]. Keys of the block, K key/value heads.
      block_v: as block_k.
      cache_k: [B, K, C, d]. Committed keys; unread where the mask is False.
      cache_v: as cache_k. Must be finite everywhere, as 0 * NaN is NaN.
      block_mask: bool[B, T, T] (or [1, T, T]). Query row, key row.
      cache_mask: bool[B, T, C]. Query row, cache position.
      scale: factor on the scores.

    Every query must see at least one key.

    Returns:
      float32[B, T, N, d].
    """
    b, t, n, d = q.shape
    k = block_k.shape[1]
    grouped = q.reshape(b, t, k, n // k, d).transpose(0, 2, 3, 1, 4)
    grouped = (grouped * jnp.float32(scale)).reshape(b, k, n // k * t, d)

    def masked(scores: jax.Array, mask: jax.Array) -> jax.Array:
        shape = (b, k, n // k, t, scores.shape[-1])
        mask = jnp.broadcast_to(mask[:, None, None], (b, 1, 1, t, shape[-1]))
        return jnp.where(mask, scores.reshape(shape), NEG_INF)

    on_cache = masked(_dot(grouped, cache_k, 3), cache_mask)
    on_block = masked(_dot(grouped, block_k, 3), block_mask)
    top = jnp.maximum(
        jnp.max(on_cache, axis=-1, keepdims=True),
        jnp.max(on_block, axis=-1, keepdims=True),
    )
    on_cache, on_block = jnp.exp(on_cache - top), jnp.exp(on_block - top)
    total = jnp.sum(on_cache, -1, keepdims=True) + jnp.sum(on_block, -1, keepdims=True)

    def weighed(weights: jax.Array, values: jax.Array) -> jax.Array:
        flat = weights.reshape(b, k, n // k * t, weights.shape[-1])
        return _dot(flat, values, 2).reshape(b, k, n // k, t, d)

    out = (weighed(on_cache, cache_v) + weighed(on_block, block_v)) / total
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, d)


def _dot(x: jax.Array, y: jax.Array, contract: int) -> jax.Array:
    """Batched product over (request, head); y's axis `contract` is summed."""
    exact = jax.lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x.astype(y.dtype),
        y,
        (((3,), (contract,)), ((0, 1), (0, 1))),
        precision=exact,
        preferred_element_type=jnp.float32,
    )


def cache_mask(
    positions: jax.Array, lengths: jax.Array, capacity: int, window: int | None
) -> jax.Array:
    """Which cache positions each query sees.

    Args:
      positions: int32[B, T]. Absolute positions of the queries.
      lengths: int32[B]. Committed positions; the rest is never read.
      capacity: C.
      window: visible positions including the query's own, or None.

    Returns:
      bool[B, T, C].
    """
    slots = jnp.arange(capacity, dtype=jnp.int32)[None, None]
    visible = slots < lengths[:, None, None]
    if window is not None:
        visible &= positions[:, :, None] - slots < window
    return jnp.broadcast_to(visible, (*positions.shape, capacity))


def causal_block_mask(width: int, window: int | None) -> jax.Array:
    """bool[1, T, T]: each row sees itself and earlier rows of its block."""
    row = jnp.arange(width, dtype=jnp.int32)
    gap = row[:, None] - row[None, :]
    visible = gap >= 0
    if window is not None:
        visible &= gap < window
    return visible[None]


def full_block_mask(width: int, window: int | None) -> jax.Array:
    """bool[1, T, T]: every row sees the whole block (draft backbone)."""
    row = jnp.arange(width, dtype=jnp.int32)
    gap = row[:, None] - row[None, :]
    visible = jnp.ones((width, width), bool) if window is None else gap < window
    return visible[None]
