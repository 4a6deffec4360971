"""A DeepSeek-V4 target as pure functions: declare, evaluate rows, commit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from dspark_jax.config_v4 import V4Config
from dspark_jax.models.deepseek_v4 import hyper
from dspark_jax.models.deepseek_v4.attention import View, view_of
from dspark_jax.models.deepseek_v4.layer import layer_declaration, layer_module
from dspark_jax.models.deepseek_v4.parallel import ALONE, Parallel
from dspark_jax.models.deepseek_v4.state import State
from dspark_jax.models.layers import Norm, Table, embed, existing, matmul
from dspark_jax.models.params import Tree, build, flatten, partition, unflatten
from dspark_jax.models.rows import Rows, picked, side_by_side


class _Ends(nnx.Module):
    """Embedding, the head's mixture and norm, and the head."""

    def __init__(self, config: V4Config):
        """Declares the tables, the norm and the mixture."""
        v, h = config.vocab_size, config.hidden_size
        self.embed = Table(v, h, ("vocab", "embed"), config.dtype)
        self.hc_head = hyper.HeadMixture(config)
        self.norm = Norm(h, config.rms_norm_eps, config.dtype)
        self.lm_head = Table(v, h, ("vocab", "embed"), config.dtype)


@functools.cache
def _ends(config: V4Config):
    return build(lambda: _Ends(config))


@functools.cache
def declaration(config: V4Config) -> tuple[Tree, Tree]:
    """(shapes, axes) of all parameters; layers lie one by one, by number."""
    _, shapes, axes = _ends(config)
    layer_shapes, layer_axes = declare_layers(config)
    return {**shapes, "layers": layer_shapes}, {**axes, "layers": layer_axes}


def declare_layers(config: V4Config) -> tuple[Tree, Tree]:
    """(shapes, axes) of the layers by number."""
    found = [layer_declaration(config, layer) for layer in range(config.num_layers)]
    shapes = {str(i): one for i, (_, one, _) in enumerate(found)}
    return shapes, {str(i): axes for i, (_, _, axes) in enumerate(found)}


def abstract_params(config: V4Config) -> Tree:
    """Nested dict of `jax.ShapeDtypeStruct`."""
    return declaration(config)[0]


def unit_counts(config: V4Config) -> dict[str, int]:
    """Units of logical axes that sharding must not cut inside one."""
    return {
        "heads": config.num_heads,
        "o_groups": config.o_groups,
        "index_heads": config.index_heads,
        "experts": config.num_experts,
    }


def evaluate(
    config: V4Config,
    params: Tree,
    state: State,
    capacity: int,
    rows: Rows,
    taps: tuple[int, ...] = (),
    logit_rows: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array, State]:
    """Evaluates rows against the committed positions; writes nothing.

    Args:
      config: the target.
      params: plain dict, see `declaration`.
      state: see `state`.
      capacity: C, positions the state was made for.
      rows: G rows; row j of a request sees its earlier rows and the state.
      taps: layers whose outputs make the draft's context features.
      logit_rows: int32[R]. Rows whose logits are wanted; None is all of them.
      mesh: devices over whose "tensor" axis heads and experts are split.

    Returns:
      logits: float32[R, V].
      features: float32[G, m * H]. Means over the streams of the tapped outputs, side
        by side, in the order of `taps`.
      pending: what the block adds to the state.
    """
    del capacity
    x = hyper.spread(embed(params["embed"]["weight"], rows.token), config.streams)
    x, tapped, pending = run_layers(
        config, params["layers"], x, rows, state, taps, mesh
    )
    features = side_by_side(tapped, x.shape[0])
    x = picked(x, logit_rows)
    graphdef, shapes, _ = _ends(config)
    modules = nnx.merge(graphdef, {name: params[name] for name in shapes})
    hidden = modules.norm(modules.hc_head(x))
    logits = head_logits(config, hidden, head_table(params))
    wanted = logits if logit_rows is None else logits[: len(logit_rows)]
    return wanted, features, pending


def run_layers(
    config: V4Config,
    layers: Tree,
    x: jax.Array,
    rows: Rows,
    state: State,
    taps: tuple[int, ...],
    mesh: Mesh | None,
) -> tuple[jax.Array, list[jax.Array], State]:
    """All layers, by hand on the "tensor" axis where there is one.

    Returns:
      (streams float32[G, S, H], means of the tapped outputs float32[G, H], what the
      block adds to the state).
    """
    views = {ratio: view_of(config, ratio, rows) for ratio in config.compress_ratios}
    # Without the barrier XLA would compute them again inside every layer.
    views = jax.lax.optimization_barrier(views)

    def run(layers: Tree, x: jax.Array, views: dict[int, View], state: State, axis):
        parallel = Parallel(axis) if axis else ALONE
        outputs: dict[int, jax.Array] = {}
        pending: State = {}
        for layer, ratio in enumerate(config.compress_ratios):
            name = str(layer)
            module = layer_module(config, layer, layers[name])
            x, pending[name] = module(x, views[ratio], state[name], parallel)
            if layer in taps:
                outputs[layer] = jnp.mean(x, axis=1)
        return x, [outputs[tap] for tap in taps], pending

    if mesh is None or mesh.shape.get("tensor", 1) == 1:
        return run(layers, x, views, state, None)
    return by_hand(functools.partial(run, axis="tensor"), config, layers, mesh)(
        layers, x, views, state
    )


def by_hand(function, config: V4Config, layers: Tree, mesh: Mesh):
    """`function(layers, *rest)` on every device's own part of the layers.

    Everything else is whole on all devices of the axis, what comes out too.
    """
    whole = PartitionSpec()
    axes = flatten(declare_layers(config)[1])
    counts = unit_counts(config)
    own: dict[tuple[str, ...], Any] = {}
    for path, leaf in flatten(layers).items():
        found = partition(axes[path], leaf.shape, mesh, counts)
        own[path] = PartitionSpec(*(a if a == "tensor" else None for a in found))

    def run(*args):
        specs = (unflatten(own), *(whole for _ in args[1:]))
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=specs,
            out_specs=whole,
            axis_names={"tensor"},
            check_vma=False,
        )(*args)

    return run


def head_table(params: Tree) -> jax.Array:
    """The output head's weight."""
    return params["lm_head"]["weight"]


def head_logits(config: V4Config, hidden: jax.Array, table: jax.Array) -> jax.Array:
    """float32[R, V] from normed hidden rows; ids that do not exist are -inf."""
    logits = matmul(hidden, table.astype(jnp.float32))
    return existing(logits, config.valid_vocab)
