"""A request takes the place of another in a running batch."""

from __future__ import annotations

import dataclasses

import jax

from dspark_jax.decoding.state import DecodeState


def insert(
    state: DecodeState, part: DecodeState, row: jax.Array, place: jax.Array
) -> DecodeState:
    """Moves one request of `part` into a place of `state`.

    Every number that belongs to the place's old request is overwritten, so that
    nothing of it is left; its neighbours' are not touched.

    Args:
      state: B requests between rounds.
      part: requests behind their prefill, of the same capacity and settings.
      row: int32[]. Which of them.
      place: int32[]. 0..B - 1.
    """

    def put(axis: int):
        def one(into: jax.Array, new: jax.Array) -> jax.Array:
            if into.ndim == 0:
                # Of the batch as a whole: rounds so far.
                return into
            new = jax.lax.dynamic_slice_in_dim(new, row, 1, axis)
            return jax.lax.dynamic_update_slice_in_dim(into, new, place, axis)

        return one

    def caches(into, new):
        # [B, ...], behind a layer axis when layers are stacked.
        return jax.tree.map(lambda x, y: put(x.ndim - 4)(x, y), into, new)

    rest = jax.tree.map(
        put(0),
        dataclasses.replace(state, target={}, draft=None),
        dataclasses.replace(part, target={}, draft=None),
    )
    return dataclasses.replace(
        rest,
        target=caches(state.target, part.target),
        draft=caches(state.draft, part.draft),
    )
