"""Compressed entries: one row for every r positions, a softmax over their raw rows.

    a_p = Wkv x_p,   s_p = Wgate x_p + ape[p % r]
    entry w = rope(norm(sum_p softmax_p(s_p) a_p), r w)

The softmax runs channel by channel. With r = 128 it is over positions r w .. r w + 127.
With r = 4 entries overlap: rows are twice as wide, the first half of the channels
belongs to the next entry, the second half to its own, and an entry takes eight rows.
An entry exists once its last position is committed; a row of position p sees the
entries below (p + 1) // r.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config_v4 import SELECTED_RATIO, V4Config
from dspark_jax.models.deepseek_v4 import recent, rotary, rounding
from dspark_jax.models.deepseek_v4.state import EntryState
from dspark_jax.models.deepseek_v4.weights import Matrix
from dspark_jax.models.layers import Norm
from dspark_jax.models.params import declare
from dspark_jax.models.rows import Rows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["slot", "phase", "first", "exists", "tables"],
    meta_fields=["ratio"],
)
@dataclass(frozen=True)
class EntryView:
    """Where the entries that a block may complete take their rows from.

    Attributes:
      slot: int32[B, E, R]. Rows of each entry, counted from the earliest row kept.
      phase: int32[G]. Position of each flat row, modulo r.
      first: int32[B]. Entries that are committed, which is the first one's number.
      exists: bool[B, E, R]. Rows at positions that exist.
      tables: of the entries' positions, [B, E, rope_dim / 2].
      ratio: static, r.
    """

    slot: jax.Array
    phase: jax.Array
    first: jax.Array
    exists: jax.Array
    tables: rotary.Tables
    ratio: int


def entry_view(config: V4Config, ratio: int, rows: Rows) -> EntryView:
    """The view of a block for layers of `ratio`."""
    most, used = entries_of(rows.width, ratio), config.entry_rows(ratio)
    first = rows.start // ratio
    number = first[:, None] + recent.numbers(most, 2)
    earliest = ratio * (number + 1) - used
    position = earliest[..., None] + recent.numbers(used, 3)
    kept = rows.start - (used - 1)
    return EntryView(
        slot=position - kept[:, None, None],
        phase=rows.position % ratio,
        first=first,
        exists=position >= 0,
        tables=rotary.tables(config, ratio, number * ratio),
        ratio=ratio,
    )


def entries_of(width: int, ratio: int) -> int:
    """Entries that `width` rows can complete."""
    return (width + ratio - 1) // ratio


class Compressor(nnx.Module):
    """Makes entries of width `dim` from the residual stream."""

    def __init__(self, config: V4Config, ratio: int, dim: int, for_index: bool = False):
        """Declares projections, the phase bias and the norm."""
        self.overlaps = ratio == SELECTED_RATIO
        width, hidden = dim * (1 + self.overlaps), config.hidden_size
        axes = (None, None)
        self.wkv = Matrix(width, hidden, axes, config.dtype, in_float32=True)
        self.wgate = Matrix(width, hidden, axes, config.dtype, in_float32=True)
        self.ape = declare((ratio, width), "float32", axes)
        self.norm = Norm(dim, config.rms_norm_eps, config.dtype)
        self.dim, self.rope_dim = dim, config.rope_dim
        self.rounds, self.for_index = config.round_activations, for_index

    def __call__(
        self, x: jax.Array, rows: Rows, view: EntryView, state: EntryState
    ) -> EntryState:
        """What the block adds to a layer's entries; nothing is written.

        Args:
          x: float32[G, H]. Normed input of the attention.
          rows: the flat rows.
          view: see there.
          state: committed rows and entries.

        Returns:
          Raw rows [B, T, c] and the entries [B, E, dim] from number `view.first` on;
          those that the block does not complete hold garbage.
        """
        values = rows.pad(self.wkv(x))
        bias = jnp.take(self.ape[...], view.phase, axis=0, mode="clip")
        scores = rows.pad(self.wgate(x) + bias)
        entries = self._entries(
            recent.joined(state["values"], rows.start, state_rows(state), values),
            recent.joined(state["scores"], rows.start, state_rows(state), scores),
            view,
        )
        dtype = state["entries"].dtype
        return {
            "values": values,
            "scores": scores,
            "entries": entries.astype(dtype),
        }

    def _entries(
        self, values: jax.Array, scores: jax.Array, view: EntryView
    ) -> jax.Array:
        a, s = recent.take(values, view.slot), recent.take(scores, view.slot)
        if self.overlaps:
            # Rows of the window before give their first half.
            a, s = (self._halves(x, view.ratio) for x in (a, s))
        s = jnp.where(view.exists[..., None], s, -jnp.inf)
        weights = jax.nn.softmax(s, axis=2)
        entry = self.norm(jnp.sum(weights * a, axis=2))
        entry = rotary.rotate_tail(entry, view.tables)
        if not self.rounds:
            return entry
        if self.for_index:
            return rounding.round_index(entry)
        return rounding.round_keys(entry, self.rope_dim)

    def _halves(self, x: jax.Array, ratio: int) -> jax.Array:
        """[B, E, 2 r, 2 dim] -> [B, E, 2 r, dim]."""
        earlier, own = x[:, :, :ratio, : self.dim], x[:, :, ratio:, self.dim :]
        return jnp.concatenate([earlier, own], axis=2)


def state_rows(state: EntryState) -> int:
    """Rows below a block that its first entry may need."""
    return state["values"].shape[1] - 1
