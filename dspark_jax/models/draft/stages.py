"""The draft of a DeepSeek-V4 target: a few of its own layers over injected context.

    m_q   = norm(fc(features_q))            one row a committed position
    ring  = rope(norm(wkv m_q), q)          of every stage, the last W positions
    block = [anchor, noise, noise, ...]     at positions p + 1 .. p + gamma
    keys  = the ring up to p and the whole block; no mask inside the block

Block keys are never stored. After the last stage the streams collapse to h; the
target's head reads norm(h), the confidence head h itself (DeepSeek-V4, DSpark stages).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from dspark_jax.config_draft import DraftConfig
from dspark_jax.config_v4 import V4Config
from dspark_jax.models.deepseek_v4 import hyper, model, placing, recent, rotary
from dspark_jax.models.deepseek_v4.attention import scored, softmax_over
from dspark_jax.models.deepseek_v4.layer import layer_module
from dspark_jax.models.deepseek_v4.parallel import ALONE, Parallel
from dspark_jax.models.deepseek_v4.weights import Matrix
from dspark_jax.models.draft.heads import ConfidenceHead, MarkovHead
from dspark_jax.models.layers import Norm, embed
from dspark_jax.models.params import Axes, Tree, build
from dspark_jax.models.rows import Rows, dense_rows

# {"0": {"ring": [B, W, d]}, ...}, one a stage
Rings = dict[str, dict[str, jax.Array]]


class Ends(nnx.Module):
    """Everything of a draft that is not a stage."""

    def __init__(self, config: DraftConfig):
        """Declares the projection of features, norms, the mixture and the heads."""
        stages = stages_of(config)
        h, dtype, eps = stages.hidden_size, stages.dtype, stages.rms_norm_eps
        width = len(config.target_layer_ids) * h
        self.fc = Matrix(h, width, (None, None), dtype, stages.weights)
        self.hidden_norm = Norm(h, eps, dtype)
        self.hc_head = hyper.HeadMixture(stages)
        self.norm = Norm(h, eps, dtype)
        self.markov = MarkovHead(config)
        self.confidence = ConfidenceHead(config)


def stages_of(config: DraftConfig) -> V4Config:
    """The stages' settings."""
    assert isinstance(config.backbone, V4Config)
    return config.backbone


@functools.cache
def _ends(config: DraftConfig):
    return build(lambda: Ends(config))


@functools.cache
def declaration(config: DraftConfig) -> tuple[Tree, Tree]:
    """(shapes, axes) of a draft's parameters; stages lie one by one, by number."""
    _, shapes, axes = _ends(config)
    stage_shapes, stage_axes = model.declare_layers(stages_of(config))
    return {**shapes, "layers": stage_shapes}, {**axes, "layers": stage_axes}


def abstract_draft_params(config: DraftConfig) -> Tree:
    """Nested dict of `jax.ShapeDtypeStruct`."""
    return declaration(config)[0]


def ends(config: DraftConfig, params: Tree) -> Ends:
    """The draft's modules outside the stages, with their parameters."""
    graphdef, shapes, _ = _ends(config)
    return nnx.merge(graphdef, {name: params[name] for name in shapes})


def empty_context(
    config: DraftConfig,
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    stacked: bool = False,
) -> Rings:
    """Zeros: one ring a stage, whatever the capacity."""
    del capacity, stacked
    stages = stages_of(config)
    shape = (batch, stages.window, stages.head_dim)
    return {str(i): {"ring": jnp.zeros(shape, dtype)} for i in range(stages.num_layers)}


def context_bytes(
    config: DraftConfig, batch: int, capacity: int, dtype: jnp.dtype
) -> int:
    """Bytes of the rings."""
    shapes = jax.eval_shape(lambda: empty_context(config, batch, capacity, dtype))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def inject(
    config: DraftConfig,
    params: Tree,
    context: Rings,
    features: jax.Array,
    rows: Rows,
    count: jax.Array,
) -> Rings:
    """Adds committed positions to every stage's ring.

    Args:
      config: the draft.
      params: its parameters.
      context: rings of positions below `rows.start`.
      features: float32[G, m * H]. One row a position, from the target.
      rows: the rows that made the features.
      count: int32[B]. Rows of each block that are committed; no other is written.
    """
    stages, modules = stages_of(config), ends(config, params)
    m = modules.hidden_norm(modules.fc(features))
    at = rotary.tables(stages, 0, rows.block_positions())
    result: Rings = {}
    for i in range(stages.num_layers):
        stage = layer_module(stages, i, params["layers"][str(i)])
        keys = stage.attn.projections.keys(m, rows, at)
        ring = context[str(i)]["ring"]
        result[str(i)] = {"ring": recent.store(ring, keys, rows.start, count)}
    return result


def block_rows(
    config: DraftConfig,
    params: Tree,
    target_params: Tree,
    context: Rings,
    capacity: int,
    anchor: jax.Array,
    position: jax.Array,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Evaluates one block for every request.

    Args:
      config: the draft.
      params: its parameters.
      target_params: for the embedding, which the draft shares.
      context: rings of all positions below `position`.
      capacity: unused; the rings are of one size.
      anchor: int32[B]. The last committed token.
      position: int32[B]. Its position.
      mesh: devices over whose "tensor" axis heads and experts are split.

    Returns:
      float32[B, block, H] for the output head, and for the confidence head.
    """
    del capacity
    batch, width, stages = anchor.shape[0], config.block_size, stages_of(config)
    noise = jnp.full((batch, width - 1), config.mask_token_id, jnp.int32)
    ids = jnp.concatenate([anchor[:, None], noise], axis=1)
    rows = dense_rows(ids, jnp.full((batch,), width, jnp.int32), position)
    x = embed(target_params["embed"]["weight"], rows.token)
    x = run_stages(
        stages, params["layers"], hyper.spread(x, stages.streams), rows, context, mesh
    )
    modules = ends(config, params)
    h = modules.hc_head(x)
    shape = (batch, width, -1)
    return modules.norm(h).reshape(shape), h.reshape(shape)


def run_stages(
    stages: V4Config,
    layers: Tree,
    x: jax.Array,
    rows: Rows,
    context: Rings,
    mesh: Mesh | None,
) -> jax.Array:
    """Streams float32[G, S, H] through all stages."""
    at = rotary.tables(stages, 0, rows.block_positions())

    def run(layers: Tree, x: jax.Array, context: Rings, rows: Rows, at, axis):
        parallel = Parallel(axis) if axis else ALONE
        for i in range(stages.num_layers):
            stage = layer_module(stages, i, layers[str(i)])
            pre, post, mix = stage.attn_hc.mixtures(x)
            h = stage.attn_norm(hyper.collapse(x, pre))
            ring = context[str(i)]["ring"]
            y = _attend(stages, stage.attn.projections, h, rows, at, ring, parallel)
            x = hyper.mixed(x, y, post, mix)
            x = stage.feed_forward(x, rows.token, parallel)
        return x

    if mesh is None or mesh.shape.get("tensor", 1) == 1:
        return run(layers, x, context, rows, at, None)
    split = model.by_hand(functools.partial(run, axis="tensor"), stages, layers, mesh)
    return split(layers, x, context, rows, at)


def _attend(
    stages: V4Config,
    own: Any,
    h: jax.Array,
    rows: Rows,
    at: rotary.Tables,
    ring: jax.Array,
    parallel: Parallel,
) -> jax.Array:
    """Every block row sees the ring and the whole block: float32[G, H]."""
    q = own.queries(own.low_rank(h), rows, at)
    window = stages.window
    keys = recent.joined(ring, rows.start, window, own.keys(h, rows, at))
    position = rows.start[:, None] - window
    position = position + recent.numbers(keys.shape[1], 2)
    seen = jnp.broadcast_to(position[:, None] >= 0, (*q.shape[:2], keys.shape[1]))
    part = scored(q, keys, seen, stages.head_dim**-0.5)
    return own.output(softmax_over([part], own.sink[...]), rows, at, parallel)


def base_logits(
    config: DraftConfig, params: Tree, target_params: Tree, hidden: jax.Array
) -> jax.Array:
    """float32[R, H] -> float32[R, V] by the target's head, before the bias."""
    del params
    return model.head_logits(stages_of(config), hidden, model.head_table(target_params))


def for_cpu(config: DraftConfig, params: Tree, whole_numbers: bool = False) -> Tree:
    """`params` as decoding on a CPU wants them."""
    return placing.for_cpu(stages_of(config), params, whole_numbers)


def state_axes(leaf: jax.Array) -> Axes:
    """Logical axes of a ring."""
    return placing.state_axes(leaf)


def grown(config: DraftConfig, context: Rings, capacity: int, more: int) -> Rings:
    """The same rings: their size does not depend on the capacity."""
    del config, capacity, more
    return context
