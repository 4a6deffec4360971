"""Attention over whole sequences, for training: no cache, every position at once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dspark_jax.models.decoder_layer import DecoderLayer
from dspark_jax.models.layers import rms_normalise, rotate

Rope = tuple[jax.Array, jax.Array]


def _heads(x: jax.Array, head_dim: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, head_dim)


def _rotate(x: jax.Array, rope: Rope) -> jax.Array:
    return rotate(x, rope[0][:, :, None], rope[1][:, :, None])


def queries(module: DecoderLayer, h: jax.Array, rope: Rope) -> jax.Array:
    """Scaled queries float32[B, T, N, d] of normed rows float32[B, T, H]."""
    q = _heads(module.q_proj(h), module.head_dim)
    if module.q_norm is not None:
        q = module.q_norm(q)
    return _rotate(q, rope) * jnp.float32(module.scale)


def keys_values(
    module: DecoderLayer, h: jax.Array, rope: Rope
) -> tuple[jax.Array, jax.Array]:
    """Keys and values float32[B, T, K, d] of rows float32[B, T, H]."""
    k = _heads(module.k_proj(h), module.head_dim)
    v = k if module.v_proj is None else _heads(module.v_proj(h), module.head_dim)
    if module.k_norm is not None:
        k = module.k_norm(k)
    if module.gemma:
        v = rms_normalise(v, module.eps)
    return _rotate(k, rope), v


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int | None
) -> jax.Array:
    """Grouped attention of each position to itself and earlier ones.

    Args:
      q: float32[B, T, N, d]. Scaled.
      k: float32[B, T, K, d].
      v: as k.
      window: visible positions including the query's own, or None.

    Returns:
      float32[B, T, N, d].
    """
    return by_sequence(functools.partial(_causal, window), q, k, v)


def by_sequence(one: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """`one` of every entry of the leading axis.

    On processors one after the other, which keeps the scores in their caches.
    """

    def in_turn(*arrays: jax.Array) -> jax.Array:
        return jax.lax.map(lambda entry: one(*entry), arrays)

    return jax.lax.platform_dependent(*arrays, cpu=in_turn, default=jax.vmap(one))


def _causal(window: int | None, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    t, n, d = q.shape
    groups = k.shape[1]
    q = q.reshape(t, groups, n // groups, d).transpose(1, 2, 0, 3)
    q = q.reshape(groups, -1, d)
    scores = _product(q, k.transpose(1, 0, 2), 2).reshape(groups, -1, t, t)
    at = jnp.arange(t, dtype=jnp.int32)
    back = at[:, None] - at[None]
    seen = back >= 0
    if window is not None:
        seen &= back < window
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = _product(weights.reshape(groups, -1, t), v.transpose(1, 0, 2), 1)
    mixed = mixed.reshape(groups, -1, t, d) / total
    return mixed.transpose(2, 0, 1, 3).reshape(t, n, d)


def _product(x: jax.Array, y: jax.Array, contract: int) -> jax.Array:
    return jax.lax.dot_general(
        x,
        y,
        (((2,), (contract,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
    )
