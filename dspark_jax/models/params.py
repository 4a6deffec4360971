"""Declared parameters: shapes, dtypes and logical axes, from the modules alone.

A Flax module is the one place that names a parameter, its shape, dtype and
logical axes. Abstract trees, shardings and random initial values derive from
it; parameters themselves are plain nested dicts with string keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.models import int8, panels

Tree = dict[str, Any]
Axes = tuple[str | None, ...]

# Logical axis -> mesh axis. "layers" and "embed" stay whole on every device.
DEFAULT_RULES: Mapping[str, str] = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    # Key/value heads of a cache; one entry of the axis is one head.
    "cache_heads": "tensor",
    "mlp": "tensor",
    "experts": "tensor",
    "o_groups": "tensor",
    "index_heads": "tensor",
    "batch": "data",
}


def declare(shape: tuple[int, ...], dtype: str, axes: Axes) -> nnx.Param:
    """A parameter of a module: its shape, dtype and logical axes."""
    return nnx.Param(jnp.zeros(shape, jnp.dtype(dtype)), out_sharding=axes)


def build(make: Callable[[], nnx.Module]) -> tuple[nnx.GraphDef, Tree, Tree]:
    """Builds a module without allocating.

    Returns:
      (graphdef, shapes, axes): the graph definition for `nnx.merge`, a nested
      dict of `jax.ShapeDtypeStruct`, and the same dict with logical axes.
    """
    with nnx.use_eager_sharding(False):
        module = nnx.eval_shape(make)
    graphdef, state = nnx.split(module)
    shapes: Tree = {}
    axes: Tree = {}
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_value()
        names = tuple(str(key) for key in path)
        put(shapes, names, jax.ShapeDtypeStruct(value.shape, value.dtype))
        put(axes, names, tuple(variable.get_metadata()["out_sharding"]))
    return graphdef, shapes, axes


def put(tree: Tree, path: tuple[str, ...], value: Any) -> None:
    """Sets `tree[path[0]][path[1]]...` to `value`, making the dicts between."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def flatten(tree: Tree, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Leaves of a nested dict by path, in a fixed order."""
    flat: dict[tuple[str, ...], Any] = {}
    for key in sorted(tree):
        value = tree[key]
        if isinstance(value, dict):
            flat |= flatten(value, (*prefix, key))
        else:
            flat[(*prefix, key)] = value
    return flat


def unflatten(flat: Mapping[tuple[str, ...], Any]) -> Tree:
    """Inverse of `flatten`."""
    tree: Tree = {}
    for path, value in flat.items():
        put(tree, path, value)
    return tree


def stack_shapes(shapes: Tree, axes: Tree, count: int) -> tuple[Tree, Tree]:
    """The declaration of `count` equal layers stacked on a leading axis."""
    stacked = {
        path: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype)
        for path, leaf in flatten(shapes).items()
    }
    named = {path: ("layers", *leaf) for path, leaf in flatten(axes).items()}
    return unflatten(stacked), unflatten(named)


def for_cpu(params: Tree, whole_numbers: bool = False) -> Tree:
    """`params` as decoding on a CPU wants them: layers listed, matrices cut.

    XLA on CPU copies a layer's weights out of a stack at each use, so separate
    arrays decode faster there; for the cut see `panels`. Doing it twice changes
    nothing.

    Args:
      params: of a target or a draft.
      whole_numbers: matrices become `int8.Int8` instead, those outside of the
        layers too; layers must be stacked.
    """
    groups: Tree = {}
    form = _whole if whole_numbers else _cut
    for kind, stack in params.get("layers", {}).items():
        groups[kind] = stack if is_listed(stack) else _split(stack, form)
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    if whole_numbers:
        rest = unflatten({path: _whole(leaf) for path, leaf in flatten(rest).items()})
    return {**rest, "layers": groups}


def _cut(leaf: jax.Array) -> jax.Array:
    return panels.cut(leaf) if panels.can_cut(leaf) else leaf


def _whole(leaf: jax.Array) -> Any:
    return int8.quantise(leaf) if int8.can_quantise(leaf) else leaf


def _split(stack: Tree, form: Callable[[jax.Array], Any]) -> Tree:
    flat = flatten(stack)
    count = next(iter(flat.values())).shape[0]

    def layer(index: int) -> Tree:
        leaves = {path: leaf[index] for path, leaf in flat.items()}
        return unflatten({path: form(leaf) for path, leaf in leaves.items()})

    return {str(index): layer(index) for index in range(count)}


def is_listed(stack: Tree) -> bool:
    """Whether a layer group holds one dict a layer ("0", "1", ...)."""
    return "0" in stack


def is_stacked(params: Tree) -> bool:
    """Whether all layers of a model lie in stacks."""
    return not any(is_listed(stack) for stack in params["layers"].values())


def layer_at(stack: Tree, index: int) -> Tree:
    """Parameters of one layer of a group, stacked or listed."""
    if is_listed(stack):
        return stack[str(index)]
    return unflatten({path: leaf[index] for path, leaf in flatten(stack).items()})


def partition(
    axes: Axes,
    shape: tuple[int, ...],
    mesh: Mesh,
    counts: Mapping[str, int],
    rules: Mapping[str, str] = DEFAULT_RULES,
) -> PartitionSpec:
    """Where one array lies on `mesh`.

    A dimension is split when its logical axis has a mesh axis and its units
    divide evenly: `counts` gives the number of units for axes that must not be
    cut inside one (attention heads), otherwise the dimension itself counts.
    Anything else is replicated.
    """
    spec: list[str | None] = []
    for name, size in zip(axes, shape, strict=True):
        mesh_axis = rules.get(name) if name else None
        if mesh_axis in mesh.shape and mesh_axis not in spec:
            units = counts.get(name or "", size)
            spec.append(mesh_axis if units % mesh.shape[mesh_axis] == 0 else None)
        else:
            spec.append(None)
    return PartitionSpec(*spec)


def shardings(
    shapes: Tree,
    axes: Tree,
    mesh: Mesh,
    counts: Mapping[str, int],
    rules: Mapping[str, str] = DEFAULT_RULES,
) -> Tree:
    """A `NamedSharding` for every declared parameter; see `partition`."""
    named = flatten(axes)
    return unflatten(
        {
            path: NamedSharding(
                mesh, partition(named[path], leaf.shape, mesh, counts, rules)
            )
            for path, leaf in flatten(shapes).items()
        }
    )


def random_params(shapes: Tree, key: jax.Array, scale: float = 1.0) -> Tree:
    """Random parameters for tests and fresh drafts.

    Matrices are normal with deviation `scale / sqrt(fan_in)`, norm gains one,
    biases zero. The last axis is the fan-in, as weights are `[out, in]`.
    """

    def make(key: jax.Array) -> Tree:
        leaves: dict[tuple[str, ...], jax.Array] = {}
        for index, (path, leaf) in enumerate(flatten(shapes).items()):
            if path[-1] == "bias":
                value = jnp.zeros(leaf.shape, jnp.float32)
            elif path[-2].endswith("norm") or path[-2] == "layer_scalar":
                value = jnp.ones(leaf.shape, jnp.float32)
            else:
                value = jax.random.normal(jax.random.fold_in(key, index), leaf.shape)
                value = value * jnp.float32(scale / math.sqrt(leaf.shape[-1]))
            leaves[path] = value.astype(leaf.dtype)
        return unflatten(leaves)

    return jax.jit(make)(key)


def check_tree(params: Tree, shapes: Tree, what: str) -> None:
    """Raises ValueError unless `params` matches the declaration `shapes`.

    Layer groups may be stacked or listed, listed ones cut; dtypes are free, so that
    a caller may keep other precisions.
    """
    listed = {k for k, v in params.get("layers", {}).items() if is_listed(v)}
    want: dict[tuple[str, ...], tuple[int, ...]] = {}
    for path, leaf in flatten(shapes).items():
        if path[0] == "layers" and path[1] in listed:
            for i in range(leaf.shape[0]):
                want[(*path[:2], str(i), *path[2:])] = leaf.shape[1:]
        else:
            want[path] = leaf.shape
    have = {path: tuple(leaf.shape) for path, leaf in flatten(params).items()}
    for path in have:
        if path[0] == "layers" and path[1] in listed:
            have[path] = panels.whole_shape(have[path])
    problems = [f"missing {'.'.join(p)}" for p in want if p not in have]
    problems += [f"unexpected {'.'.join(p)}" for p in have if p not in want]
    problems += [
        f"{'.'.join(p)} has shape {have[p]}, expected {want[p]}"
        for p in want
        if p in have and have[p] != want[p]
    ]
    if problems:
        shown = "; ".join(problems[:5])
        raise ValueError(
            f"{what} parameters do not match the config ({len(problems)} problems): "
            f"{shown}"
        )
