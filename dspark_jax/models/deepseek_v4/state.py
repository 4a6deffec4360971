"""What a request has committed, addressed so that nothing ever rolls back.

    {"0": {"window": [B, W, d]},                          ratio 0
     "2": {"window": ..., "entries": {...}, "index": {...}},   ratio 4
     "3": {"window": ..., "entries": {...}}}                   larger ratios

`entries` and `index` hold raw rows in rings, `values` and `scores` float32[B, R, c],
and the finished `entries` [B, M, dim] by their number. A round evaluates its rows
against this and hands its own rows out as `pending`, of the same structure; `commit`
writes those that were accepted, and only those. A rejected row therefore never touches
a slot, and rings are as small as what is read: W for the window, 8 raw rows for ratio
4, r for the others. (V rows written before they are judged need V - 1 slots more.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config_v4 import SELECTED_RATIO, V4Config
from dspark_jax.models.deepseek_v4 import recent

State = dict[str, dict[str, Any]]
EntryState = dict[str, jax.Array]


def state_shapes(
    config: V4Config, batch: int, capacity: int, dtype: jnp.dtype
) -> dict[str, dict[str, Any]]:
    """Shapes and types of a state, as `jax.ShapeDtypeStruct`s."""

    def entries(ratio: int, dim: int) -> dict[str, jax.ShapeDtypeStruct]:
        wide = dim * (2 if ratio == SELECTED_RATIO else 1)
        raw = jax.ShapeDtypeStruct(
            (batch, config.entry_rows(ratio), wide), jnp.dtype(jnp.float32)
        )
        count = -(-capacity // ratio)
        done = jax.ShapeDtypeStruct((batch, count, dim), jnp.dtype(dtype))
        return {"values": raw, "scores": raw, "entries": done}

    state: dict[str, dict[str, Any]] = {}
    for layer, ratio in enumerate(config.compress_ratios):
        window = (batch, config.window, config.head_dim)
        own: dict[str, Any] = {"window": jax.ShapeDtypeStruct(window, jnp.dtype(dtype))}
        if ratio:
            own["entries"] = entries(ratio, config.head_dim)
        if ratio == SELECTED_RATIO:
            own["index"] = entries(ratio, config.index_dim)
        state[str(layer)] = own
    return state


def empty_state(
    config: V4Config,
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    stacked: bool = False,
) -> State:
    """Zeros for `batch` requests of up to `capacity` positions; layers are listed."""
    del stacked
    shapes = state_shapes(config, batch, capacity, dtype)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def state_bytes(config: V4Config, batch: int, capacity: int, dtype: jnp.dtype) -> int:
    """Bytes of a state."""
    leaves = jax.tree.leaves(state_shapes(config, batch, capacity, dtype))
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in leaves)


def commit(
    config: V4Config, state: State, pending: State, start: jax.Array, count: jax.Array
) -> State:
    """Writes the first `count` rows of every block, and the entries they complete.

    Args:
      config: the model.
      state: see the module.
      pending: the same structure for a block, from `evaluate`.
      start: int32[B]. Position of each block's first row.
      count: int32[B]. Rows to keep.
    """
    result: State = {}
    for layer, ratio in enumerate(config.compress_ratios):
        old, new = state[str(layer)], pending[str(layer)]
        own: dict[str, Any] = {
            "window": recent.store(old["window"], new["window"], start, count)
        }
        for name in ("entries", "index"):
            if name in old:
                own[name] = _entries(old[name], new[name], start, count, ratio)
        result[str(layer)] = own
    return result


def _entries(
    old: EntryState, new: EntryState, start: jax.Array, count: jax.Array, ratio: int
) -> EntryState:
    total = old["entries"].shape[1]
    first = start // ratio
    offset = recent.numbers(new["entries"].shape[1], 2)
    number = first[:, None] + offset
    made = number < ((start + count) // ratio)[:, None]
    request = jnp.arange(len(start), dtype=jnp.int32)[:, None]
    at = jnp.where(made, number, total)
    return {
        "values": recent.store(old["values"], new["values"], start, count),
        "scores": recent.store(old["scores"], new["scores"], start, count),
        "entries": old["entries"].at[request, at].set(new["entries"], mode="drop"),
    }
