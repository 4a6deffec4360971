"""The draft backbone: context from target features, one block in parallel.

    context = norm(fc(features))          keys and values only, per position
    block   = [anchor, mask, mask, ...]   sees all context and the whole block

Context rows skip the layers' input norm and are injected once, when their
position is committed. Block rows are evaluated and dropped (DSpark paper,
section 3.1).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from dspark_jax.config import DecoderConfig
from dspark_jax.config_draft import DraftConfig
from dspark_jax.models import dense
from dspark_jax.models.decoder_layer import block_view
from dspark_jax.models.draft.heads import ConfidenceHead, MarkovHead
from dspark_jax.models.kv_cache import Cache, write_rows
from dspark_jax.models.layers import Linear, Norm, Table, matmul
from dspark_jax.models.params import Axes, Tree, build, layer_at
from dspark_jax.models.rows import Rows, dense_rows
from dspark_jax.models.stack import layer_module, run_layers


class _Ends(nnx.Module):
    """Everything of a draft that is not a layer."""

    def __init__(self, config: DraftConfig):
        """Declares projections, norms, heads and tables of its own."""
        backbone = decoder_of(config)
        h, dtype, eps = backbone.hidden_size, backbone.dtype, backbone.rms_norm_eps
        taps = len(config.target_layer_ids)
        self.fc = Linear(h, taps * h, ("embed", None), dtype)
        self.hidden_norm = Norm(h, eps, dtype)
        self.norm = Norm(h, eps, dtype)
        if config.markov_rank:
            self.markov = MarkovHead(config)
        if config.confidence:
            self.confidence = ConfidenceHead(config)
        if config.own_embed:
            self.embed = Table(backbone.vocab_size, h, ("vocab", "embed"), dtype)
        if config.own_head:
            self.lm_head = Table(config.head_rows, h, ("vocab", "embed"), dtype)


def decoder_of(config: DraftConfig) -> DecoderConfig:
    """The layers' settings."""
    assert isinstance(config.backbone, DecoderConfig)
    return config.backbone


@functools.cache
def _ends(config: DraftConfig):
    return build(lambda: _Ends(config))


@functools.cache
def declaration(config: DraftConfig) -> tuple[Tree, Tree]:
    """(shapes, axes) of a draft's parameters, layers stacked by kind.

    A reduced vocabulary adds `d2t` int32[V_draft], the target id of each row.
    """
    _, shapes, axes = _ends(config)
    layer_shapes, layer_axes = dense.declare_layers(decoder_of(config))
    shapes = {**shapes, "layers": layer_shapes}
    axes = {**axes, "layers": layer_axes}
    if config.draft_vocab_size is not None:
        shapes["d2t"] = jax.ShapeDtypeStruct((config.draft_vocab_size,), jnp.int32)
        axes["d2t"] = (None,)
    return shapes, axes


def abstract_draft_params(config: DraftConfig) -> Tree:
    """Nested dict of `jax.ShapeDtypeStruct`."""
    return declaration(config)[0]


def ends(config: DraftConfig, params: Tree) -> _Ends:
    """The draft's non-layer modules with their parameters."""
    graphdef, shapes, _ = _ends(config)
    return nnx.merge(graphdef, {name: params[name] for name in shapes})


def embed_table(params: Tree, target_params: Tree) -> jax.Array:
    """The draft's embedding: its own, or the target's."""
    return (params if "embed" in params else target_params)["embed"]["weight"]


def head_table(params: Tree, target_params: Tree) -> jax.Array:
    """The draft's output head [V_draft, H]: its own, or the target's."""
    if "lm_head" in params:
        return params["lm_head"]["weight"]
    return dense.head_table(target_params)


def context_rows(config: DraftConfig, params: Tree, features: jax.Array) -> jax.Array:
    """float32[G, m * H] target features -> float32[G, H] context rows."""
    modules = ends(config, params)
    return modules.hidden_norm(modules.fc(features))


def inject(
    config: DraftConfig,
    params: Tree,
    context: Cache,
    features: jax.Array,
    rows: Rows,
    count: jax.Array,
) -> Cache:
    """Adds context rows to the draft's cache.

    Args:
      config: the draft.
      params: its parameters.
      context: keys and values of positions below `rows.start`.
      features: float32[G, m * H]. One row a position, from the target.
      rows: the rows that made the features. All T rows of a block are
        written at their positions; those behind the first `count` stay masked and
        are overwritten later.
      count: int32[B]. Rows of each block that are committed.

    Returns:
      The cache with the rows written.
    """
    del count
    backbone, cache = decoder_of(config), context
    ctx = context_rows(config, params, features)
    fresh: dict[str, dict[str, list[jax.Array]]] = {
        kind: {"k": [], "v": []} for kind in backbone.kinds
    }
    views = {kind: block_view(backbone, kind, rows, None) for kind in backbone.kinds}
    for layer in range(backbone.num_layers):
        kind, index = backbone.layer_slot(layer)
        stack = params["layers"][kind]
        module = layer_module(backbone, kind, layer_at(stack, index))
        k, v = module.context_kv(ctx, views[kind])
        fresh[kind]["k"].append(k)
        fresh[kind]["v"].append(v)
    block: Cache = {
        kind: {
            name: tuple(x) if isinstance(cache[kind][name], tuple) else jnp.stack(x)
            for name, x in store.items()
        }
        for kind, store in fresh.items()
    }
    return write_rows(cache, block, rows.start)


def block_rows(
    config: DraftConfig,
    params: Tree,
    target_params: Tree,
    context: Cache,
    capacity: int,
    anchor: jax.Array,
    position: jax.Array,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Evaluates one block for every request.

    Args:
      config: the draft.
      params: its parameters.
      target_params: for the tables that the draft shares.
      context: keys and values of all positions below `position`.
      capacity: C, positions the cache was made for.
      anchor: int32[B]. The last committed token.
      position: int32[B]. Its position.
      mesh: unused; how work is split follows from where parameters lie.

    Returns:
      float32[B, gamma, H] after the final norm, for the output head and again for
      the confidence head.
    """
    del mesh
    batch, width, backbone = anchor.shape[0], config.block_size, decoder_of(config)
    masks = jnp.full((batch, width - 1), config.mask_token_id, jnp.int32)
    ids = jnp.concatenate([anchor[:, None], masks], axis=1)
    rows = dense_rows(ids, jnp.full((batch,), width, jnp.int32), position)
    x = dense.embed_rows(backbone, embed_table(params, target_params), rows.token)
    views = {
        kind: block_view(backbone, kind, rows, capacity, causal=False)
        for kind in backbone.kinds
    }
    x, _, _ = run_layers(backbone, params["layers"], x, views, context)
    hidden = ends(config, params).norm(x).reshape(batch, width, -1)
    if not config.sample_from_anchor:
        hidden = hidden[:, 1:]
    return hidden, hidden


def base_logits(
    config: DraftConfig, params: Tree, target_params: Tree, hidden: jax.Array
) -> jax.Array:
    """float32[R, H] -> float32[R, V_draft], soft cap applied, before the bias.

    Ids that the target's vocabulary does not really have stay at -inf, so that
    they are never proposed.
    """
    table = head_table(params, target_params)
    if config.draft_vocab_size is None:
        return dense.head_logits(decoder_of(config), hidden, table)
    logits = dense.softcap(
        dense.matmul(hidden, table), decoder_of(config).logit_softcap
    )
    valid = config.backbone.valid_vocab
    if valid is None:
        return logits
    return jnp.where((params["d2t"] < valid)[None], logits, -jnp.inf)


def corrected_logits(
    config: DraftConfig,
    params: Tree,
    target_params: Tree,
    hidden: jax.Array,
    latent: jax.Array | None,
) -> jax.Array:
    """Base logits plus the Markov bias W2 z of known states z.

    Args:
      config: the draft.
      params: its parameters.
      target_params: for the tables that the draft shares.
      hidden: float32[R, H]. After the final norm.
      latent: float32[R, r], see `MarkovHead.latent`; None without the head.

    Returns:
      float32[R, V_draft].
    """
    logits = base_logits(config, params, target_params, hidden)
    if latent is None:
        return logits
    return logits + matmul(latent, params["markov"]["w2"]["weight"])


def for_cpu(config: DraftConfig, params: Tree, whole_numbers: bool = False) -> Tree:
    """`params` as decoding on a CPU wants them; see `params.for_cpu`."""
    return dense.for_cpu(decoder_of(config), params, whole_numbers)


def state_axes(leaf: jax.Array) -> Axes:
    """Logical axes of a context's leaf."""
    return dense.state_axes(leaf)


def grown(config: DraftConfig, context: Cache, capacity: int, more: int) -> Cache:
    """A context with room for `more` positions."""
    return dense.grown(decoder_of(config), context, capacity, more)


def empty_context(
    config: DraftConfig,
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    stacked: bool = False,
) -> Cache:
    """Empty context for `batch` requests of up to `capacity` positions."""
    return dense.empty_state(decoder_of(config), batch, capacity, dtype, stacked)


def context_bytes(
    config: DraftConfig, batch: int, capacity: int, dtype: jnp.dtype
) -> int:
    """Bytes of a context."""
    return dense.state_bytes(decoder_of(config), batch, capacity, dtype)
