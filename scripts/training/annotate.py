"""Target passes over token sequences: tapped features and top probabilities.

A wide pass of a Llama target written for throughput on few CPU cores: bfloat16
products with float32 accumulation, no cache. It equals `models.dense.evaluate`
up to rounding and exists only because training data is annotated once, in bulk.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DecoderConfig
from dspark_jax.models.layers import embed, rms_normalise, rope_tables, rotate
from dspark_jax.models.params import Tree, layer_at

BLOCK = 64


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def _norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    gain = gain.astype(jnp.float32)
    return rms_normalise(x, eps) * gain.reshape((1,) * (x.ndim - 1) + (-1,))


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal grouped attention of one sequence, [T, N, d] over [T, K, d]."""
    t, n, d = q.shape
    kv = k.shape[1]
    q = (q * jnp.float32(d**-0.5)).reshape(t, kv, n // kv, d)
    q = q.transpose(1, 2, 0, 3).reshape(kv, n // kv * t, d).astype(jnp.bfloat16)
    k, v = (x.transpose(1, 0, 2).astype(jnp.bfloat16) for x in (k, v))
    scores = _batched(q, k, 2).reshape(n, t, t)
    causal = jnp.tril(jnp.ones((t, t), bool))
    scores = jnp.where(causal[None], scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights.reshape(kv, n // kv * t, t).astype(jnp.bfloat16)
    out = _batched(weights, v, 1).reshape(n, t, d) / total
    return out.transpose(1, 0, 2).reshape(t, n * d)


def _batched(x: jax.Array, y: jax.Array, contract: int) -> jax.Array:
    dims = (((2,), (contract,)), ((0,), (0,)))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def forward(
    config: DecoderConfig, params: Tree, tokens: jax.Array, taps: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Tapped outputs bfloat16[B, T, m * H] and final normed rows float32[B, T, H]."""
    b, t = tokens.shape
    geometry = config.attention("full")
    d = geometry.head_dim
    positions = jnp.arange(t, dtype=jnp.int32)[None]
    cos, sin = rope_tables(geometry.rope, d, positions)
    cos, sin = cos[:, :, None], sin[:, :, None]
    eps = config.rms_norm_eps
    x = embed(params["embed"]["weight"], tokens)
    tapped = []
    for layer in range(config.num_layers):
        p = {
            name: leaf["weight"]
            for name, leaf in layer_at(params["layers"]["full"], layer).items()
        }
        h = _norm(x, p["input_norm"], eps).reshape(b * t, -1)
        q = rotate(_dot(h, p["q_proj"]).reshape(b, t, -1, d), cos, sin)
        k = rotate(_dot(h, p["k_proj"]).reshape(b, t, -1, d), cos, sin)
        v = _dot(h, p["v_proj"]).reshape(b, t, -1, d)
        # One sequence at a time keeps the scores in the processor's cache.
        mixed = jax.lax.map(lambda qkv: _attend(*qkv), (q, k, v)).reshape(b * t, -1)
        x = x + _dot(mixed, p["o_proj"]).reshape(x.shape)
        h = _norm(x, p["post_attention_norm"], eps).reshape(b * t, -1)
        inner = jax.nn.silu(_dot(h, p["gate_proj"])) * _dot(h, p["up_proj"])
        x = x + _dot(inner, p["down_proj"]).reshape(x.shape)
        if layer in taps:
            tapped.append(x.astype(jnp.bfloat16))
    return jnp.concatenate(tapped, axis=-1), _norm(x, params["norm"]["weight"], eps)


def top_log_probs(
    hidden: jax.Array, table: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """The `count` likeliest ids of each row at temperature 1, exactly.

    The largest `count` logits lie in the `count` blocks with the largest
    maxima, so only those blocks are sorted.

    Args:
      hidden: float32[R, H]. Final normed rows.
      table: [V, H]. V a multiple of 64.
      count: how many.

    Returns:
      (ids int32[R, count], log probabilities float32[R, count]), best first.
    """
    logits = _dot(hidden, table)
    rows, vocab = logits.shape
    blocks = logits.reshape(rows, vocab // BLOCK, BLOCK)
    maxima = jnp.max(blocks, axis=-1)
    top = jnp.max(maxima, axis=-1, keepdims=True)
    # Sums of blocks first: a long last axis is reduced without vectors on CPU.
    sums = jnp.sum(jnp.exp(blocks - top[:, :, None]), axis=-1)
    norm = jnp.log(jnp.sum(sums, axis=-1, keepdims=True)) + top
    _, best = jax.lax.top_k(maxima, count)
    candidates = jnp.take_along_axis(blocks, best[:, :, None], axis=1)
    values, where = jax.lax.top_k(candidates.reshape(rows, count * BLOCK), count)
    block = jnp.take_along_axis(best, where // BLOCK, axis=1)
    return block * BLOCK + where % BLOCK, values - norm


@functools.partial(jax.jit, static_argnames=("config", "taps", "count"))
def annotate(
    config: DecoderConfig,
    params: Tree,
    tokens: jax.Array,
    taps: tuple[int, ...],
    count: int,
):
    """Features, top ids (uint16) and log probabilities (float16) of a batch."""
    features, hidden = forward(config, params, tokens, taps)
    table = params.get("lm_head", params["embed"])["weight"]
    wide = hidden.reshape(-1, min(4, len(tokens)) * tokens.shape[1], hidden.shape[-1])
    ids, logs = jax.lax.map(lambda h: top_log_probs(h, table, count), wide)
    shape = (*tokens.shape, count)
    ids, logs = ids.astype(jnp.uint16), logs.astype(jnp.float16)
    return features, ids.reshape(shape), logs.reshape(shape)


def stores(folder: pathlib.Path, sequences: int, length: int, width: int, count: int):
    """Memory-mapped arrays on disk, opened for writing, made when absent."""
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "features": ((sequences, length, width), np.uint16),
        "top_ids": ((sequences, length, count), np.uint16),
        "top_logs": ((sequences, length, count), np.float16),
        "done": ((sequences,), np.uint8),
    }
    folder.mkdir(parents=True, exist_ok=True)
    opened = {}
    for name, (shape, dtype) in shapes.items():
        path = folder / f"{name}.npy"
        mode = "r+" if path.exists() else "w+"
        opened[name] = np.lib.format.open_memmap(
            path, mode=mode, dtype=dtype, shape=shape
        )
        if opened[name].shape != shape:
            raise ValueError(f"{path} holds {opened[name].shape}, expected {shape}")
    return opened
