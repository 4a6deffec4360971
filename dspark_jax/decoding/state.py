"""The state of a batch between rounds: one frozen pytree, donated in, returned.

    position   0 1 2 3 4 5 6 7
    token      p p p p x x A         p prompt, x emitted, A anchor
    length = 6          (positions 0..5 are in the caches)
    committed_length = 7             (the anchor is committed, not cached)

A proposal for positions 7.. waits in `proposal`. Slots from `length` on hold
garbage that no mask lets through, so nothing is ever rolled back.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.models import family
from dspark_jax.models.draft.proposal import Proposal
from dspark_jax.scheduling.memory import Memory
from dspark_jax.spec import Spec

RUNNING, STOP, LENGTH, CACHE_FULL = range(4)
FINISH_REASONS = ("running", "stop", "length", "cache_full")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rounds", "generated", "drafted", "verified_rows", "kept", "proposed"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Counters:
    """What each request did since its prefill.

    Attributes:
      rounds: int32[B]. Verification rounds.
      generated: int32[B]. Tokens emitted, the prefill's token included.
      drafted: int32[B]. Tokens proposed for verification.
      verified_rows: int32[B]. Target rows evaluated in rounds.
      kept: int32[B, n]. Rounds whose draft j was accepted and emitted.
      proposed: int32[B, n]. Rounds in which draft j was verified.
    """

    rounds: jax.Array
    generated: jax.Array
    drafted: jax.Array
    verified_rows: jax.Array
    kept: jax.Array
    proposed: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "target",
        "draft",
        "proposal",
        "anchor",
        "length",
        "budget",
        "finish",
        "counters",
        "memory",
    ],
    meta_fields=["capacity"],
)
@dataclass(frozen=True)
class DecodeState:
    """See the module.

    Attributes:
      target: what the target keeps of committed positions.
      draft: what the draft keeps of them; None when nothing is drafted.
      proposal: waiting drafts; None before the first round and in plain decoding.
      anchor: int32[B]. The last committed token.
      length: int32[B]. Cached positions; the anchor's position.
      budget: int32[B]. Tokens the request may still emit.
      finish: int32[B]. Index into `FINISH_REASONS`; 0 while running.
      counters: statistics.
      capacity: C, positions a request may commit.
      memory: what the next lengths follow from; None where they are fixed.
    """

    target: family.State
    draft: family.State | None
    proposal: Proposal | None
    anchor: jax.Array
    length: jax.Array
    budget: jax.Array
    finish: jax.Array
    counters: Counters
    capacity: int
    memory: Memory | None = None


def new_counters(batch: int, draft_length: int) -> Counters:
    """All zero; every field is a buffer of its own, as states are donated."""

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros((batch, *shape), jnp.int32)

    return Counters(
        rounds=zeros(),
        generated=zeros(),
        drafted=zeros(),
        verified_rows=zeros(),
        kept=zeros(draft_length),
        proposed=zeros(draft_length),
    )


def new_state(
    spec: Spec, batch: int, capacity: int, draft_length: int, stacked: bool
) -> DecodeState:
    """An empty state.

    Args:
      spec: the model.
      batch: B.
      capacity: C, positions a request may commit.
      draft_length: n; 0 keeps no draft context.
      stacked: whether layers are computed as a stack.
    """
    dtype = jnp.dtype(spec.cache_dtype)

    def zeros() -> jax.Array:
        return jnp.zeros((batch,), jnp.int32)

    def placed(of: family.Store, state: family.State) -> family.State:
        return jax.tree.map(lambda x: spec.shard(x, *of.state_axes(x)), state)

    target, context = family.target_of(spec.target), None
    if spec.draft is not None and draft_length > 0:
        draft = family.draft_of(spec.draft)
        size = batch, capacity, dtype, stacked
        context = placed(draft, draft.empty_context(spec.draft, *size))
    empty = target.empty_state(spec.target, batch, capacity, dtype, stacked)
    return DecodeState(
        target=placed(target, empty),
        draft=context,
        proposal=None,
        anchor=zeros(),
        length=zeros(),
        budget=zeros(),
        finish=zeros(),
        counters=new_counters(batch, draft_length),
        capacity=capacity,
    )


def state_bytes(
    spec: Spec,
    batch: int,
    capacity: int,
    draft_length: int,
    sampled: bool,
    prefill: int,
) -> dict[str, int]:
    """Bytes that decoding needs beside the parameters, by use.

    Args:
      spec: the model.
      batch: B.
      capacity: C.
      draft_length: n.
      sampled: whether laws are kept (temperature above 0).
      prefill: tokens fed at once.
    """
    dtype = jnp.dtype(spec.cache_dtype)
    rows = spec.bucket(batch, draft_length)
    vocab, hidden = spec.target.vocab_size, spec.target.hidden_size
    laws = 3 if sampled else 1
    need = {
        "target cache": family.target_of(spec.target).state_bytes(
            spec.target, batch, capacity, dtype
        ),
        "logits and laws": 4 * vocab * (rows * laws + batch),
        "activations": 4 * batch * max(prefill, spec.width) * 6 * hidden
        + 8 * batch * max(prefill, spec.width) * spec.target.num_heads * capacity,
    }
    if spec.draft is not None and draft_length:
        need["draft cache"] = family.draft_of(spec.draft).context_bytes(
            spec.draft, batch, capacity, dtype
        )
        if sampled:
            need["proposal"] = 4 * batch * draft_length * spec.draft.head_rows
    return need
