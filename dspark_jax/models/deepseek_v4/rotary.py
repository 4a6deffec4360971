"""Rotary embedding of the last channels, in neighbouring pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dspark_jax.config_v4 import V4Config
from dspark_jax.models.layers import rope_tables

# cos and sin, float32[..., rope_dim / 2]
Tables = tuple[jax.Array, jax.Array]


def tables(config: V4Config, ratio: int, positions: jax.Array) -> Tables:
    """cos and sin of a layer's rotary embedding, float32[*positions, rope_dim / 2]."""
    return rope_tables(config.rope_of(ratio), config.rope_dim, positions)


def rotate_tail(x: jax.Array, at: Tables, inverse: bool = False) -> jax.Array:
    """Rotates the last channels; pairs are channels (2i, 2i + 1) of them.

    Args:
      x: float32[..., d].
      at: cos and sin, broadcast-compatible with x's leading axes.
      inverse: rotate back. Values are rotated keys here, so outputs must be.
    """
    cos, sin = at
    size = 2 * cos.shape[-1]
    head, tail = x[..., : x.shape[-1] - size], x[..., x.shape[-1] - size :]
    pairs = tail.reshape(*tail.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    sin = -sin if inverse else sin
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return jnp.concatenate([head, turned.reshape(tail.shape)], axis=-1)
