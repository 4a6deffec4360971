"""The teacher-forced forward of a draft: many blocks of a sequence at once.

Blocks share the context rows of their sequence. A block row sees context before
its anchor and the whole of its own block, nothing else, so one pass over A
anchors equals A calls of `models.draft.backbone.block_hidden`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.config_draft import DraftConfig
from dspark_jax.models import dense
from dspark_jax.models.decoder_layer import DecoderLayer
from dspark_jax.models.draft import backbone
from dspark_jax.models.draft.heads import MarkovHead
from dspark_jax.models.layers import rope_tables
from dspark_jax.models.params import Tree, layer_at
from dspark_jax.models.stack import layer_module
from dspark_jax.training.anchors import previous_tokens
from dspark_jax.training.wide_attention import by_sequence, keys_values, queries


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["hidden", "embedded", "latent"],
    meta_fields=[],
)
@dataclass(frozen=True)
class BlockRows:
    """What the heads read, one row for every prediction; R = B * A * gamma.

    Attributes:
      hidden: float32[R, H]. After the final norm.
      embedded: float32[R, r]. W1 of the previous token; None without Markov head.
      latent: float32[R, r]. z, whose product with W2 is the bias; None likewise.
    """

    hidden: jax.Array
    embedded: jax.Array | None
    latent: jax.Array | None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["logits", "confidence"],
    meta_fields=[],
)
@dataclass(frozen=True)
class BlockOutputs:
    """Predictions of every block.

    Attributes:
      logits: float32[B, A, gamma, V_draft]. With the Markov bias.
      confidence: float32[B, A, gamma] logits, or None.
    """

    logits: jax.Array
    confidence: jax.Array | None


def block_hidden(
    config: DraftConfig,
    params: Tree,
    target_params: Tree,
    tokens: jax.Array,
    features: jax.Array,
    anchors: jax.Array,
) -> jax.Array:
    """Evaluates the backbone on all blocks.

    Args:
      config: the draft.
      params: its parameters.
      target_params: for the tables that the draft shares.
      tokens: int32[B, S].
      features: float[B, S, m * H]. Target features of every position.
      anchors: int32[B, A]. Positions; dummies (0) give values without meaning.

    Returns:
      float32[B, A, block_size, H] after the final norm.
    """
    decoder, width = backbone.decoder_of(config), config.block_size
    batch, length = tokens.shape
    first = jnp.take_along_axis(tokens, anchors, axis=1)[:, :, None]
    masks = jnp.full((*anchors.shape, width - 1), config.mask_token_id, jnp.int32)
    ids = jnp.concatenate([first, masks], axis=-1)
    steps = jnp.arange(width, dtype=jnp.int32)[None, None]
    positions = (anchors[:, :, None] + steps).reshape(batch, -1)
    every = jnp.arange(length, dtype=jnp.int32)[None]

    table = backbone.embed_table(params, target_params)
    x = dense.embed_rows(decoder, table, ids.reshape(batch, -1))
    rows = features.reshape(batch * length, -1).astype(jnp.float32)
    context = backbone.context_rows(config, params, rows).reshape(batch, length, -1)
    for layer in range(decoder.num_layers):
        kind, index = decoder.layer_slot(layer)
        geometry = decoder.attention(kind)
        module = layer_module(decoder, kind, layer_at(params["layers"][kind], index))
        rope = functools.partial(rope_tables, geometry.rope, geometry.head_dim)
        x = _layer(
            module, x, context, anchors, rope(positions), rope(every), geometry.window
        )
    hidden = backbone.ends(config, params).norm(x)
    return hidden.reshape(*anchors.shape, width, -1)


def _layer(
    module: DecoderLayer,
    x: jax.Array,
    context: jax.Array,
    anchors: jax.Array,
    block_rope: tuple[jax.Array, jax.Array],
    context_rope: tuple[jax.Array, jax.Array],
    window: int | None,
) -> jax.Array:
    """One layer on float32[B, A * g, H] block rows; context rows only give KV."""
    h = module.input_norm(x)
    q = queries(module, h, block_rope)
    block_k, block_v = keys_values(module, h, block_rope)
    context_k, context_v = keys_values(module, context, context_rope)
    attend = jax.checkpoint(functools.partial(_attend, window))
    mixed = by_sequence(attend, q, block_k, block_v, context_k, context_v, anchors)
    out = module.o_proj(mixed)
    if module.gemma:
        out = module.post_attention_norm(out)
    return module.mlp_sublayer(x + out)


def _attend(
    window: int | None,
    q: jax.Array,
    block_k: jax.Array,
    block_v: jax.Array,
    context_k: jax.Array,
    context_v: jax.Array,
    anchors: jax.Array,
) -> jax.Array:
    """Attention of one sequence's blocks.

    Args:
      window: visible positions including the query's own, or None.
      q: float32[A * g, N, d]. Scaled queries.
      block_k: float32[A * g, K, d].
      block_v: as block_k.
      context_k: float32[S, K, d].
      context_v: as context_k.
      anchors: int32[A].

    Returns:
      float32[A * g, N * d].
    """
    rows, n, d = q.shape
    k, a = block_k.shape[1], anchors.shape[0]
    g, repeat, length = rows // a, n // k, context_k.shape[0]
    # [K, A, repeat * g, d]: queries that share keys lie together.
    q = q.reshape(a, g, k, repeat, d).transpose(2, 0, 3, 1, 4)
    on_context = _dot(
        q.reshape(k, a * repeat * g, d), context_k.transpose(1, 0, 2), 1
    ).reshape(k, a, repeat, g, length)
    keys = block_k.reshape(a, g, k, d).transpose(2, 0, 1, 3)
    values = block_v.reshape(a, g, k, d).transpose(2, 0, 1, 3)
    on_block = _dot(q.reshape(k, a, repeat * g, d), keys, 2)
    on_block = on_block.reshape(k, a, repeat, g, g)

    at = jnp.arange(length, dtype=jnp.int32)
    step = jnp.arange(g, dtype=jnp.int32)
    seen = jnp.broadcast_to((at[None] < anchors[:, None])[:, None], (a, g, length))
    if window is not None:
        here = (anchors[:, None] + step[None])[:, :, None]
        seen &= here - at[None, None] < window
        near = step[:, None] - step[None] < window
        on_block = jnp.where(near[None, None, None], on_block, -jnp.inf)
    on_context = jnp.where(seen[None, :, None], on_context, -jnp.inf)

    top = jnp.maximum(
        jnp.max(on_context, axis=-1, keepdims=True),
        jnp.max(on_block, axis=-1, keepdims=True),
    )
    top = jax.lax.stop_gradient(top)
    on_context, on_block = jnp.exp(on_context - top), jnp.exp(on_block - top)
    sums = jnp.sum(on_context, -1, keepdims=True) + jnp.sum(on_block, -1, keepdims=True)
    mixed = jax.lax.dot_general(
        on_context.reshape(k, a * repeat * g, length),
        context_v.transpose(1, 0, 2),
        (((2,), (1,)), ((0,), (0,))),
        precision=jax.lax.Precision.HIGHEST,
    ).reshape(k, a, repeat, g, d)
    own = jax.lax.dot_general(
        on_block.reshape(k, a, repeat * g, g),
        values,
        (((3,), (2,)), ((0, 1), (0, 1))),
        precision=jax.lax.Precision.HIGHEST,
    ).reshape(k, a, repeat, g, d)
    out = (mixed + own) / sums
    return out.transpose(1, 3, 0, 2, 4).reshape(rows, n * d)


def _dot(x: jax.Array, y: jax.Array, batch: int) -> jax.Array:
    """Scores `x @ y^T` over `batch` leading axes."""
    lead = tuple(range(batch))
    last = x.ndim - 1
    return jax.lax.dot_general(
        x, y, (((last,), (last,)), (lead, lead)), precision=jax.lax.Precision.HIGHEST
    )


def block_rows(
    config: DraftConfig,
    params: Tree,
    target_params: Tree,
    tokens: jax.Array,
    features: jax.Array,
    anchors: jax.Array,
    labels: jax.Array,
) -> BlockRows:
    """What the heads read, each row given the true tokens before it.

    Args:
      config: the draft.
      params: its parameters.
      target_params: for the tables that the draft shares.
      tokens: int32[B, S].
      features: float32[B, S, m * H].
      anchors: int32[B, A].
      labels: int32[B, A, gamma]. Target ids; see `anchors.block_labels`.
    """
    hidden = block_hidden(config, params, target_params, tokens, features, anchors)
    if not config.sample_from_anchor:
        hidden = hidden[:, :, 1:]
    flat = hidden.reshape(-1, hidden.shape[-1])
    if not config.markov_rank:
        return BlockRows(flat, None, None)
    markov = backbone.ends(config, params).markov
    first = jnp.take_along_axis(tokens, anchors, axis=1)
    embedded = markov.embed(previous_tokens(first, labels).reshape(-1))
    if config.markov_head == "rnn":
        latent = _rnn_latent(markov, hidden, embedded)
    else:
        latent, _ = markov.latent(flat, embedded, markov.initial_state(1))
    return BlockRows(flat, embedded, latent)


def confidence_logits(
    config: DraftConfig, params: Tree, rows: BlockRows, detach: bool
) -> jax.Array | None:
    """float32[R] acceptance logits; None without the head.

    `detach` cuts the gradient into what the head reads.
    """
    if not config.confidence:
        return None
    reads = (rows.hidden, rows.embedded)
    if detach:
        reads = jax.lax.stop_gradient(reads)
    return backbone.ends(config, params).confidence(*reads)


def teacher_forced(
    config: DraftConfig,
    params: Tree,
    target_params: Tree,
    tokens: jax.Array,
    features: jax.Array,
    anchors: jax.Array,
    labels: jax.Array,
    detach_confidence: bool,
) -> BlockOutputs:
    """All predictions; arguments as for `block_rows` and `confidence_logits`."""
    rows = block_rows(config, params, target_params, tokens, features, anchors, labels)
    logits = backbone.corrected_logits(
        config, params, target_params, rows.hidden, rows.latent
    )
    confidence = confidence_logits(config, params, rows, detach_confidence)
    if confidence is not None:
        confidence = confidence.reshape(labels.shape)
    return BlockOutputs(logits.reshape(*labels.shape, -1), confidence)


def _rnn_latent(
    markov: MarkovHead, hidden: jax.Array, embedded: jax.Array
) -> jax.Array:
    batch, count, gamma, width = hidden.shape
    rows = hidden.reshape(batch * count, gamma, width)
    embedded = embedded.reshape(batch * count, gamma, -1)
    state = markov.initial_state(batch * count)
    latents = []
    for step in range(gamma):
        z, state = markov.latent(rows[:, step], embedded[:, step], state)
        latents.append(z)
    return jnp.stack(latents, axis=1).reshape(batch * count * gamma, -1)
