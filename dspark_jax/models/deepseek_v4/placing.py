"""Where parameters and states lie: on a CPU, and on a mesh."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.config_v4 import V4Config
from dspark_jax.models.deepseek_v4.model import unit_counts
from dspark_jax.models.deepseek_v4.state import State
from dspark_jax.models.deepseek_v4.weights import BLOCK
from dspark_jax.models.params import Axes, Tree


def for_cpu(config: V4Config, params: Tree, whole_numbers: bool = False) -> Tree:
    """`params` as decoding on a CPU wants them; layers lie one by one already.

    Raises:
      ValueError: 8-bit integers asked for, which are for dense models.
    """
    if whole_numbers:
        raise ValueError(
            "`weights` is 'int8' with a DeepSeek-V4 model; use 'float', which keeps "
            "the 8-bit and 4-bit floats of the checkpoint"
        )
    return params


def check_mesh(config: V4Config, mesh: Mesh) -> None:
    """Heads, groups, experts and blocks of scales must divide by the tensor axis.

    Raises:
      ValueError: what does not, and which numbers of devices would do.
    """
    devices = mesh.shape.get("tensor", 1)
    units = dict(unit_counts(config))
    if config.weights != "float":
        # Scales are cut with the rows, or columns, that they are for.
        per_head = config.num_heads * config.head_dim
        per_index = config.index_heads * config.index_dim
        units["blocks of query rows"] = -(-per_head // BLOCK)
        units["blocks of output rows"] = -(-config.o_groups * config.o_rank // BLOCK)
        units["blocks of index rows"] = -(-per_index // BLOCK)
    odd = {name: count for name, count in units.items() if count % devices}
    if odd:
        shown = ", ".join(f"{count} {name}" for name, count in odd.items())
        most = math.gcd(*units.values())
        raise ValueError(
            f"`mesh` has {devices} devices on its tensor axis, which do not divide "
            f"{shown}; allowed: the divisors of {most}"
        )


def state_axes(leaf: Any) -> Axes:
    """Logical axes of a state's leaf: requests first, the rest whole everywhere."""
    return ("batch", *[None] * (leaf.ndim - 1))


def chunk_fits(start: int, width: int, capacity: int) -> bool:
    """Whether a prompt chunk may begin at `start`: only committed rows are written."""
    del start, width, capacity
    return True


def grown(config: V4Config, state: State, capacity: int, more: int) -> State:
    """The state with room for `more` positions: longer lists of entries."""

    def longer(layer: dict[str, Any], ratio: int) -> dict[str, Any]:
        result = dict(layer)
        for name in ("entries", "index"):
            if name in layer:
                extra = -(-more // ratio) + capacity // -ratio
                done = jnp.pad(layer[name]["entries"], [(0, 0), (0, extra), (0, 0)])
                result[name] = {**layer[name], "entries": done}
        return result

    ratios = enumerate(config.compress_ratios)
    return {str(i): longer(state[str(i)], ratio) for i, ratio in ratios}


def cut(
    config: V4Config, state: State, place: jax.Array, start: jax.Array, size: int
) -> State:
    """What the request in a place keeps of positions `start` .. `start + size - 1`.

    Rings come whole, entries are those that hold one of the positions.
    """

    def one(layer: dict[str, Any], ratio: int) -> dict[str, Any]:
        layer = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, place, 1, 0), layer
        )
        for name in ("entries", "index"):
            if name in layer:
                number = start // ratio + jnp.arange(-(-size // ratio) + 1)
                done = layer[name]["entries"]
                done = jnp.take(done, number, axis=1, mode="fill", fill_value=0)
                layer[name] = {**layer[name], "entries": done}
        return layer

    ratios = enumerate(config.compress_ratios)
    return {str(i): one(state[str(i)], ratio) for i, ratio in ratios}


def put(config: V4Config, state: State, part: State, place: jax.Array) -> State:
    """Writes what `cut` gave from position 0 on to a request; the excess is cut off."""
    del config

    def write(full: jax.Array, part: jax.Array) -> jax.Array:
        part = part[:, : full.shape[1]]
        at = [place, *[jnp.zeros_like(place)] * (full.ndim - 1)]
        return jax.lax.dynamic_update_slice(full, part, at)

    return jax.tree.map(write, state, part)
