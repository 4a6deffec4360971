"""Wide passes of a target over whole sequences: what a draft is trained on.

Every position at once, without a cache. The result equals `models.dense.evaluate`
up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.config import DecoderConfig
from dspark_jax.models import dense
from dspark_jax.models.layers import matmul, rope_tables, softcap
from dspark_jax.models.params import Tree, layer_at
from dspark_jax.models.stack import layer_module
from dspark_jax.training.wide_attention import causal_attention, keys_values, queries

# Logits of this many rows at a time.
ROWS = 1024
BLOCK = 64

Arrays = Mapping[str, np.ndarray]


def hidden_states(
    config: DecoderConfig, params: Tree, tokens: jax.Array, taps: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Tapped layer outputs and final rows of sequences.

    Args:
      config: the target.
      params: its parameters, layers stacked or listed, not cut in panels.
      tokens: int32[B, T].
      taps: layer ids; -1 is the embedding.

    Returns:
      (features bfloat16[B, T, m * H] in the order of `taps`, rows after the final
      norm float32[B, T, H]).
    """
    batch, length = tokens.shape
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    ropes = {
        kind: rope_tables(
            config.attention(kind).rope, config.attention(kind).head_dim, positions
        )
        for kind in config.kinds
    }
    x = dense.embed_rows(config, params["embed"]["weight"], tokens)
    outputs = {-1: x.astype(jnp.bfloat16)}
    for layer in range(config.num_layers):
        kind, index = config.layer_slot(layer)
        module = layer_module(config, kind, layer_at(params["layers"][kind], index))
        h = module.input_norm(x)
        q = queries(module, h, ropes[kind])
        k, v = keys_values(module, h, ropes[kind])
        window = config.attention(kind).window
        mixed = causal_attention(q, k, v, window)
        out = module.o_proj(mixed.reshape(batch, length, -1))
        if module.gemma:
            out = module.post_attention_norm(out)
        x = module.mlp_sublayer(x + out)
        if layer in taps:
            outputs[layer] = x.astype(jnp.bfloat16)
    norm = nnx.merge(dense.norm_graph(config), params["norm"])
    return jnp.concatenate([outputs[tap] for tap in taps], axis=-1), norm(x)


def top_log_probs(
    config: DecoderConfig, hidden: jax.Array, table: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """The `count` likeliest ids of each row at temperature 1, exactly.

    The largest `count` logits lie in the `count` blocks with the largest maxima,
    so only those blocks are sorted.

    Args:
      config: the target.
      hidden: float32[R, H]. Final normed rows.
      table: [V, H].
      count: how many.

    Returns:
      (ids int32[R, count], log probabilities float32[R, count]), best first.
    """
    logits = softcap(matmul(hidden, table), config.logit_softcap)
    rows, vocab = logits.shape
    exists = vocab if config.valid_vocab is None else config.valid_vocab
    if exists < vocab or vocab % BLOCK:
        pad = -vocab % BLOCK
        logits = jnp.pad(logits, ((0, 0), (0, pad)))
        real = jnp.arange(vocab + pad, dtype=jnp.int32) < exists
        logits = jnp.where(real[None], logits, -jnp.inf)
    blocks = logits.reshape(rows, -1, BLOCK)
    maxima = jnp.max(blocks, axis=-1)
    top = jnp.max(maxima, axis=-1, keepdims=True)
    # Sums of blocks first: a long last axis is reduced without vectors on CPU.
    sums = jnp.sum(jnp.exp(blocks - top[:, :, None]), axis=-1)
    norm = jnp.log(jnp.sum(sums, axis=-1, keepdims=True)) + top
    _, best = jax.lax.top_k(maxima, min(count, maxima.shape[1]))
    candidates = jnp.take_along_axis(blocks, best[:, :, None], axis=1)
    values, where = jax.lax.top_k(candidates.reshape(rows, -1), count)
    block = jnp.take_along_axis(best, where // BLOCK, axis=1)
    return block * BLOCK + where % BLOCK, values - norm


@functools.partial(jax.jit, static_argnames=("config", "taps", "top"))
def annotate(
    config: DecoderConfig,
    params: Tree,
    tokens: jax.Array,
    taps: tuple[int, ...],
    top: int,
) -> dict[str, jax.Array]:
    """What training needs of each position; see `fields`.

    Args:
      config: the target.
      params: its parameters, not cut in panels.
      tokens: int32[B, T].
      taps: layer ids.
      top: ids of the target's law to keep; 0 keeps the final row instead.
    """
    features, hidden = hidden_states(config, params, tokens, taps)
    if top == 0:
        return {"features": features, "hidden": hidden.astype(jnp.bfloat16)}
    table = dense.head_table(params)
    flat = hidden.reshape(-1, hidden.shape[-1])
    spare = -len(flat) % min(ROWS, len(flat))
    chunks = jnp.pad(flat, ((0, spare), (0, 0))).reshape(
        -1, min(ROWS, len(flat)), flat.shape[-1]
    )
    ids, logs = jax.lax.map(lambda h: top_log_probs(config, h, table, top), chunks)

    def by_position(x: jax.Array) -> jax.Array:
        return x.reshape(-1, top)[: len(flat)].reshape(*tokens.shape, top)

    return {
        "features": features,
        "top_ids": by_position(ids).astype(id_dtype(config)),
        "top_logs": by_position(logs).astype(jnp.float16),
    }


def id_dtype(config: DecoderConfig) -> str:
    """The shortest dtype that holds every id."""
    return "uint16" if config.vocab_size <= 2**16 else "int32"


def fields(
    config: DecoderConfig, taps: tuple[int, ...], top: int
) -> dict[str, tuple[int, str]]:
    """Width and dtype of what `annotate` gives for one position, by name."""
    width = len(taps) * config.hidden_size
    if top == 0:
        return {
            "features": (width, "bfloat16"),
            "hidden": (config.hidden_size, "bfloat16"),
        }
    return {
        "features": (width, "bfloat16"),
        "top_ids": (top, id_dtype(config)),
        "top_logs": (top, "float16"),
    }
