"""A request takes the place of another in a running batch."""

from __future__ import annotations

import dataclasses

import jax

from dspark_jax.decoding.state import DecodeState
from dspark_jax.models import family
from dspark_jax.spec import Spec


def insert(
    spec: Spec, state: DecodeState, part: DecodeState, row: jax.Array, place: jax.Array
) -> DecodeState:
    """Moves one request of `part` into a place of `state`.

    Every number that belongs to the place's old request is overwritten, so that
    nothing of it is left; its neighbours' are not touched.

    Args:
      spec: the model.
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

    def store(of: family.Store, into, new):
        def one(x: jax.Array, y: jax.Array) -> jax.Array:
            return put(of.state_axes(x).index("batch"))(x, y)

        return jax.tree.map(one, into, new)

    rest = jax.tree.map(
        put(0),
        dataclasses.replace(state, target={}, draft=None),
        dataclasses.replace(part, target={}, draft=None),
    )
    context = state.draft
    if spec.draft is not None:
        context = store(family.draft_of(spec.draft), context, part.draft)
    target = store(family.target_of(spec.target), state.target, part.target)
    return dataclasses.replace(rest, target=target, draft=context)
