"""Verification one row at a time, which ends at the first draft that falls.

The target evaluates row j of every request that still stands, commits it, and goes on
to row j + 1 while anybody stands. Fewer rows are evaluated where drafts are bad, and a
step of the target is paid for each accepted draft: the slower way wherever rows that
come together are cheap. What is emitted is the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.decoding.judging import Judged
from dspark_jax.decoding.requests import Requests
from dspark_jax.decoding.state import RUNNING, DecodeState
from dspark_jax.decoding.words import RoundWords
from dspark_jax.models import family
from dspark_jax.models.draft.proposal import Proposal
from dspark_jax.models.rows import uniform_rows
from dspark_jax.spec import Spec


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "stands", "target", "judged"],
    meta_fields=[],
)
@dataclass(frozen=True)
class _Loop:
    """Between two rows.

    Attributes:
      step: int32[]. Rows evaluated so far.
      stands: bool[B]. Requests whose next row will be.
      target: the target's state, all evaluated rows committed.
      judged: results by request and row, [B, n + 1, ...].
    """

    step: jax.Array
    stands: jax.Array
    target: family.State
    judged: Judged


def judge_one_by_one(
    spec: Spec,
    state: DecodeState,
    proposal: Proposal,
    requests: Requests,
    words: RoundWords,
    masks: jax.Array | None,
    one: Callable[..., Judged],
) -> tuple[Judged, family.State]:
    """Rows of a round one after the other.

    Args:
      spec: the model.
      state: before the round.
      proposal: n drafts a request.
      requests: settings.
      words: of the round.
      masks: as in `round.decode_round`.
      one: `judging.judge` but for the state, rows, `is_verify`, proposal, words and
        masks, which come as keyword arguments.

    Returns:
      (results of rows by request, [B * (n + 1), ...], zeros where a row was not
      reached; the target's state with the rows in it that the round will emit).
    """
    batch, n = proposal.ids.shape
    bucket = max(2, batch)
    # The last committed token, then the drafts.
    block = jnp.concatenate([state.anchor[:, None], proposal.ids], axis=1)
    # Tokens that a request may still emit, as `publishing.settle` counts them.
    room = state.capacity - state.length - 1
    room = jnp.minimum(state.budget, room)

    def row(loop: _Loop) -> Judged:
        """Row `step` of every request that stands."""
        step = loop.step

        def at(x: Any, count: int) -> Any:
            """[B, count, ...] -> [B, 1, ...]; rows behind the last draft see its."""
            if x is None:
                return None
            index = jnp.minimum(step, count - 1)
            return jax.lax.dynamic_slice_in_dim(x, index, 1, axis=1)

        tokens = jax.lax.dynamic_slice_in_dim(block, step, 1, axis=1)
        alive = loop.stands.astype(jnp.int32)
        rows = uniform_rows(tokens, alive, state.length + step, spec.width, bucket)
        drafts = Proposal(
            at(proposal.ids, n),
            at(proposal.weights, n),
            at(proposal.offset, n),
            at(proposal.confidence, n),
            proposal.generation,
        )
        return one(
            cache=loop.target,
            rows=rows,
            is_verify=jnp.broadcast_to(step < n, (bucket,)),
            proposal=drafts,
            words=RoundWords(at(words.fresh, n + 1), words.draft),
            masks=at(masks, n + 1),
        )

    def body(loop: _Loop) -> _Loop:
        found = row(loop)
        alive = loop.stands.astype(jnp.int32)
        target = family.target_of(spec.target).commit(
            spec.target, loop.target, found.pending, state.length + loop.step, alive
        )
        narrow = dataclasses.replace(found, pending={})

        def put(into: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.where(
                loop.stands.reshape(-1, *[1] * (new.ndim - 1)),
                new[:batch],
                jnp.zeros_like(new[:batch]),
            )
            return jax.lax.dynamic_update_slice_in_dim(
                into, new[:, None], loop.step, axis=1
            )

        token = found.verdict.token[:batch]
        stops = jnp.any(token[:, None] == requests.stop_ids, axis=1)
        stands = loop.stands & found.verdict.accept[:batch] & ~stops
        stands = stands & (loop.step + 1 < room)
        judged = jax.tree.map(put, loop.judged, narrow)
        return _Loop(loop.step + 1, stands, target, judged)

    nothing: Any = None
    start = _Loop(jnp.int32(0), state.finish == RUNNING, state.target, nothing)
    shapes = jax.eval_shape(lambda: dataclasses.replace(row(start), pending={}))
    empty = jax.tree.map(
        lambda x: jnp.zeros((batch, n + 1, *x.shape[1:]), x.dtype), shapes
    )
    start = dataclasses.replace(start, judged=empty)
    end = jax.lax.while_loop(
        lambda loop: (loop.step <= n) & jnp.any(loop.stands), body, start
    )

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(batch * (n + 1), *x.shape[2:])

    return jax.tree.map(flat, end.judged), end.target
