"""From verdicts to emitted tokens, and the state that follows from them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.decoding.state import (
    CACHE_FULL,
    LENGTH,
    RUNNING,
    STOP,
    Counters,
    DecodeState,
)
from dspark_jax.scheduling.memory import Offer
from pallas_kernels.publish import Published, publish


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["confidence", "overlap"],
    meta_fields=[],
)
@dataclass(frozen=True)
class RoundTrace:
    """What a round knew about the drafts it verified.

    Attributes:
      confidence: float32[B, n]. Logits of the proposal that was verified, see
        `Proposal`; None without a confidence head.
      overlap: float32[B, n]. `sum_v min(p_v, q_v)` of the rows that each draft was
        judged by and drawn from; None where the program holds no rows.
    """

    confidence: jax.Array | None
    overlap: jax.Array | None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "emitted",
        "n_emitted",
        "n_kept",
        "n_drafts",
        "finish",
        "logprobs",
        "trace",
        "offer",
        "proposed",
    ],
    meta_fields=[],
)
@dataclass(frozen=True)
class RoundOut:
    """What a round hands to the caller.

    Attributes:
      emitted: int32[B, T]. Tokens from the left, -1 behind them.
      n_emitted: int32[B].
      n_kept: int32[B]. Accepted drafts among them.
      n_drafts: int32[B]. Drafts that were verified.
      finish: int32[B]. Index into `FINISH_REASONS`; 0 while running.
      logprobs: float32[B, T] of the emitted tokens, or None.
      trace: of the drafts that were verified, or None.
      offer: of the next proposal, where lengths are scheduled.
      proposed: int32[B, n]. The next proposal's ids, where masks follow from them.
    """

    emitted: jax.Array
    n_emitted: jax.Array
    n_kept: jax.Array
    n_drafts: jax.Array
    finish: jax.Array
    logprobs: jax.Array | None = None
    trace: RoundTrace | None = None
    offer: Offer | None = None
    proposed: jax.Array | None = None


def settle(
    state: DecodeState,
    accept: jax.Array,
    token: jax.Array,
    draft_ids: jax.Array,
    n_drafts: jax.Array,
    stop_ids: jax.Array,
    cached: int = 1,
) -> tuple[DecodeState, RoundOut]:
    """Publishes a round's verdicts and moves lengths, budgets and counters.

    Args:
      state: before the round.
      accept: bool[B, T]. Verdicts, T = n + 1.
      token: int32[B, T]. Tokens of the rows.
      draft_ids: int32[B, n].
      n_drafts: int32[B]. How many of them were judged.
      stop_ids: int32[B, S].
      cached: 1 in a round, whose every emitted token stands for one evaluated
        row (the old anchor and all drafts but the new anchor); 0 in prefill.
    """
    active = state.finish == RUNNING
    # Committed tokens: `length` cached ones and, in a round, the anchor.
    room = state.capacity - state.length - cached
    out: Published = publish(
        accept,
        token,
        draft_ids,
        n_drafts,
        stop_ids,
        jnp.minimum(state.budget, room),
        active,
    )
    budget = state.budget - out.n_emitted
    room = room - out.n_emitted
    finish = jnp.where(room <= 0, CACHE_FULL, RUNNING)
    finish = jnp.where(budget <= 0, LENGTH, finish)
    finish = jnp.where(out.stopped, STOP, finish)
    finish = jnp.where(active, finish, state.finish).astype(jnp.int32)
    state = dataclasses.replace(
        state,
        anchor=jnp.where(out.n_emitted > 0, out.next_token, state.anchor),
        length=state.length + cached * out.n_emitted,
        budget=budget,
        finish=finish,
        counters=_count(state.counters, out, active, n_drafts, cached),
    )
    checked = jnp.where(active, n_drafts, 0)
    return state, RoundOut(
        out.emitted, out.n_emitted, out.n_kept_drafts, checked, finish
    )


def _count(
    counters: Counters,
    out: Published,
    active: jax.Array,
    n_drafts: jax.Array,
    cached: int,
) -> Counters:
    one = active.astype(jnp.int32) * cached
    step = jnp.arange(counters.kept.shape[1], dtype=jnp.int32)[None]

    def first(count: jax.Array) -> jax.Array:
        return ((step < count[:, None]) & active[:, None]).astype(jnp.int32)

    return Counters(
        rounds=counters.rounds + one,
        generated=counters.generated + out.n_emitted,
        drafted=counters.drafted + one * n_drafts,
        verified_rows=counters.verified_rows + one * (n_drafts + 1),
        kept=counters.kept + first(out.n_kept_drafts),
        proposed=counters.proposed + first(n_drafts),
    )
