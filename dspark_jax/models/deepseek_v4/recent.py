"""Rings: the last positions of a request, read in position order.

Position p lies in slot p % size. Only committed positions are ever written (`store`),
so a ring needs no slack for rows that a round may reject: what they would have
overwritten, position p - size, is still there.

    ring of 8, start 11     slot      0  1  2  3  4  5  6  7
                            position  8  9 10  3  4  5  6  7
    before(ring, 11, 5)                             6  7  8  9 10
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def numbers(count: int, rank: int) -> jax.Array:
    """0 .. count - 1 on the last of `rank` axes, int32[1, .., count]."""
    return jnp.arange(count, dtype=jnp.int32).reshape((1,) * (rank - 1) + (count,))


def before(ring: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """The `count` positions below `start`, in order.

    Args:
      ring: [B, size, ...], count <= size.
      start: int32[B].
      count: static. Positions below 0 hold finite garbage.

    Returns:
      [B, count, ...].
    """
    steps = numbers(count, 2)
    # Not negative, so that the remainder is the slot.
    size = ring.shape[1]
    slot = (start[:, None] + (size - count) + steps) % size
    return take(ring, slot)


def joined(ring: jax.Array, start: jax.Array, count: int, block: jax.Array):
    """`count` positions below `start`, then the block's: [B, count + T, ...]."""
    old = before(ring, start, count)
    return jnp.concatenate([old, block.astype(ring.dtype)], axis=1)


def store(
    ring: jax.Array, block: jax.Array, start: jax.Array, count: jax.Array
) -> jax.Array:
    """Writes the first `count` rows of each block to their positions' slots.

    Args:
      ring: [B, size, ...].
      block: [B, T, ...].
      start: int32[B]. Position of each block's first row.
      count: int32[B]. Rows to keep, 0..T.
    """
    size, width = ring.shape[1], block.shape[1]
    row = numbers(width, 2)
    left = count[:, None] - row
    # Of rows that share a slot only the last one is written.
    written = (left > 0) & (left <= size)
    slot = jnp.where(written, (start[:, None] + row) % size, size)
    request = jnp.arange(ring.shape[0], dtype=jnp.int32)[:, None]
    return ring.at[request, slot].set(block.astype(ring.dtype), mode="drop")


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[b, index[b, ...]]: [B, N, ...] and int32[B, *I] -> [B, *I, ...], clipped."""

    def one(x: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.take(x, index, axis=0, mode="clip")

    return jax.vmap(one)(x, index)
