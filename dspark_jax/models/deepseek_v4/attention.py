"""Attention of a layer: one key/value head, a window, compressed entries, a sink.

    keys of position p    p - W + 1 .. p   and entries, all of them or selected ones
    weights               softmax over keys and one extra logit a head, the sink
    output                turned back by p, as values are rotated keys

Every row gathers the keys it sees in position order, window first. A row is therefore
summed in one order, wherever its block began and however many rows came with it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config_v4 import SELECTED_RATIO, V4Config
from dspark_jax.models.deepseek_v4 import recent, rotary, rounding
from dspark_jax.models.deepseek_v4.compressor import (
    Compressor,
    EntryView,
    entry_view,
)
from dspark_jax.models.deepseek_v4.indexer import Indexer, chosen
from dspark_jax.models.deepseek_v4.parallel import Parallel
from dspark_jax.models.deepseek_v4.weights import Matrix
from dspark_jax.models.layers import Norm, rms_normalise
from dspark_jax.models.params import declare
from dspark_jax.models.rows import Rows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "at", "entries"],
    meta_fields=["ratio"],
)
@dataclass(frozen=True)
class View:
    """What layers of one ratio share in a step.

    Attributes:
      rows: the flat rows.
      at: rotary tables of the rows, [B, T, rope_dim / 2].
      entries: of the block; None in layers that see the window only.
      ratio: static.
    """

    rows: Rows
    at: rotary.Tables
    entries: EntryView | None
    ratio: int


def view_of(config: V4Config, ratio: int, rows: Rows) -> View:
    """The view of `rows` for layers of `ratio`."""
    at = rotary.tables(config, ratio, rows.block_positions())
    entries = entry_view(config, ratio, rows) if ratio else None
    return View(rows, at, entries, ratio)


class Projections(nnx.Module):
    """Queries, the shared key/value head, the sink and the grouped output."""

    def __init__(self, config: V4Config):
        """Declares them; heads, and groups of them, are split over devices."""
        hidden, d = config.hidden_size, config.head_dim
        kind, dtype, eps = config.weights, config.dtype, config.rms_norm_eps
        heads, groups = config.num_heads, config.o_groups
        self.wq_a = Matrix(config.q_rank, hidden, (None, None), dtype, kind)
        self.q_norm = Norm(config.q_rank, eps, dtype)
        self.wq_b = Matrix(heads * d, config.q_rank, ("heads", None), dtype, kind)
        self.wkv = Matrix(d, hidden, (None, None), dtype, kind)
        self.kv_norm = Norm(d, eps, dtype)
        self.sink = declare((heads,), "float32", ("heads",))
        rank, wide = config.o_rank, heads // groups * d
        self.wo_a = Matrix(groups * rank, wide, ("o_groups", None), dtype, kind)
        self.wo_b = Matrix(hidden, groups * rank, (None, "o_groups"), dtype, kind)
        self.head_dim, self.rank, self.eps = d, rank, eps
        self.rope_dim, self.rounds = config.rope_dim, config.round_activations

    def low_rank(self, x: jax.Array) -> jax.Array:
        """float32[G, H] -> float32[G, q_rank], which queries are made from."""
        return self.q_norm(self.wq_a(x))

    def queries(self, low: jax.Array, rows: Rows, at: rotary.Tables) -> jax.Array:
        """float32[B, T, N, d], normed head by head and rotated."""
        q = self.wq_b(low)
        q = rms_normalise(q.reshape(q.shape[0], -1, self.head_dim), self.eps)
        return rotary.rotate_tail(rows.pad(q), (at[0][:, :, None], at[1][:, :, None]))

    def keys(self, x: jax.Array, rows: Rows, at: rotary.Tables) -> jax.Array:
        """float32[B, T, d], keys and values alike, rotated."""
        kv = rotary.rotate_tail(rows.pad(self.kv_norm(self.wkv(x))), at)
        return rounding.round_keys(kv, self.rope_dim) if self.rounds else kv

    def output(
        self, mixed: jax.Array, rows: Rows, at: rotary.Tables, parallel: Parallel
    ) -> jax.Array:
        """float32[B, T, N, d] -> float32[G, H], summed over devices."""
        turned = (at[0][:, :, None], at[1][:, :, None])
        mixed = rotary.rotate_tail(mixed, turned, inverse=True)
        flat = rows.flat(mixed.reshape(*mixed.shape[:2], -1))
        weight = self.wo_a.expanded()
        groups, count = weight.shape[0] // self.rank, flat.shape[0]
        # One product a group, over its own heads: [groups, G, rank].
        by_group = flat.reshape(count, groups, -1).astype(weight.dtype)
        exact = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
        low = jax.lax.dot_general(
            by_group.swapaxes(0, 1),
            weight.reshape(groups, self.rank, -1),
            (((2,), (2,)), ((0,), (0,))),
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        return parallel.total(self.wo_b(low.swapaxes(0, 1).reshape(count, -1)))


class Attention(nnx.Module):
    """A layer's attention against what is committed and its own block."""

    def __init__(self, config: V4Config, ratio: int):
        """Declares projections, and what compressed entries need."""
        self.projections = Projections(config)
        self.window, self.scale = config.window, config.head_dim**-0.5
        self.compressor = Compressor(config, ratio, config.head_dim) if ratio else None
        self.indexer = Indexer(config) if ratio == SELECTED_RATIO else None

    def __call__(
        self, x: jax.Array, view: View, state: dict[str, Any], parallel: Parallel
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Evaluates the rows; nothing is written.

        Args:
          x: float32[G, H]. Normed.
          view: of the layer's ratio.
          state: the layer's, see `state`.
          parallel: see there.

        Returns:
          (float32[G, H], what the block adds to the state).
        """
        rows, own = view.rows, self.projections
        low = own.low_rank(x)
        q = own.queries(low, rows, view.at)
        pending: dict[str, Any] = {"window": own.keys(x, rows, view.at)}
        keys, seen = self._window(state["window"], pending["window"], rows)
        parts = [scored(q, keys, seen, self.scale)]
        positions = rows.block_positions()
        if self.compressor is not None and view.entries is not None:
            entries = view.entries
            old = state["entries"]
            new = pending["entries"] = self.compressor(x, rows, entries, old)
            slots = old["entries"].shape[1]
            if self.indexer is not None:
                number, pending["index"] = self.indexer(
                    x, low, rows, entries, view.at, state["index"], parallel
                )
                picked = chosen(old["entries"], new["entries"], entries.first, number)
                parts.append(scored(q, picked, number < slots, self.scale))
            else:
                every = placed(old["entries"], new["entries"], entries.first)
                number = recent.numbers(slots, 3)
                below = (positions + 1)[..., None] // view.ratio
                parts.append(scored(q, every, number < below, self.scale))
        return own.output(
            softmax_over(parts, own.sink[...]), rows, view.at, parallel
        ), pending

    def _window(
        self, ring: jax.Array, block: jax.Array, rows: Rows
    ) -> tuple[jax.Array, jax.Array]:
        """Keys [B, T, W, d] of every row, the row's own last, and which exist."""
        buffer = recent.joined(ring, rows.start, self.window - 1, block)
        row = jnp.arange(rows.width, dtype=jnp.int32)[:, None]
        step = recent.numbers(self.window, 2)
        keys = jnp.take(buffer, row + step, axis=1, mode="clip")
        position = rows.block_positions()[..., None] - (self.window - 1)
        position = position + step[None]
        return keys, position >= 0


# Scores float32[B, T, N, n] and the keys they are of.
Part = tuple[jax.Array, jax.Array]


def scored(q: jax.Array, keys: jax.Array, seen: jax.Array, scale: float) -> Part:
    """Scores of queries against keys, -inf where a key is not seen.

    Args:
      q: float32[B, T, N, d].
      keys: [B, T, n, d], or [B, n, d] for all rows of a request alike.
      seen: bool[B, T, n].
      scale: of the scores.
    """
    scores = _dot(q * jnp.float32(scale), keys, keys.ndim - 1)
    return jnp.where(seen[:, :, None], scores, -jnp.inf), keys


def softmax_over(parts: list[Part], sink: jax.Array) -> jax.Array:
    """The weighted mean of all keys, float32[B, T, N, d].

    Args:
      parts: scores and keys; part by part is the order of summing.
      sink: float32[N]. One more logit a head, without a value.
    """
    sink = sink.reshape(1, 1, -1, 1)
    top = functools.reduce(
        jnp.maximum, [jnp.max(s, axis=-1, keepdims=True) for s, _ in parts], sink
    )
    total, mixed = jnp.exp(sink - top), jnp.float32(0)
    for scores, keys in parts:
        weights = jnp.exp(scores - top)
        total = total + jnp.sum(weights, axis=-1, keepdims=True)
        mixed = mixed + _dot(weights, keys, keys.ndim - 2)
    return mixed / total


def placed(old: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
    """Entries [B, M, d] with a block's own, which begin at `first`, in place."""
    count = new.shape[1]
    number = recent.numbers(old.shape[1], 2) - first[:, None]
    own = recent.take(new, jnp.clip(number, 0, count - 1))
    inside = (number >= 0) & (number < count)
    return jnp.where(inside[..., None], own, old)


def _dot(x: jax.Array, y: jax.Array, contract: int) -> jax.Array:
    """[B, T, N, k] with y's axis `contract`; y is [B, T, ...] or [B, ...]."""
    exact = jax.lax.Precision.HIGHEST if y.dtype == jnp.float32 else None
    shared = y.ndim == 3
    b, t, n, k = x.shape
    left = x.reshape(b, t * n, k) if shared else x
    batched = (0,) if shared else (0, 1)
    out = jax.lax.dot_general(
        left.astype(y.dtype),
        y,
        (((left.ndim - 1,), (contract,)), (batched, batched)),
        precision=exact,
        preferred_element_type=jnp.float32,
    )
    return out.reshape(b, t, n, -1)
