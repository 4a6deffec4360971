"""Compiled programs of the host loop, one for each bucket that was met.

    init   (B, C, drafts?)                  empty caches
    feed   (B, C, drafts?, P)               a chunk of prompt tokens
    begin  (B, C, n, noisy, policy?, masked?)  first token and first proposal
    round  (B, C, n, variant, extras, plan?, masked?)  one round
    insert (B, B', C, n, what is kept)      a request of B' into a batch of B

`begin` runs once a request, so one program serves every setting but shared noise; an
option that is toggled costs one `round` program at most.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.equivalence import Equivalence
from dspark_jax.decoding.extras import Extras
from dspark_jax.decoding.joining import insert
from dspark_jax.decoding.placement import places
from dspark_jax.decoding.prefill import begin, feed
from dspark_jax.decoding.publishing import RoundOut
from dspark_jax.decoding.requests import Requests, Variant, is_noisy
from dspark_jax.decoding.round import decode_round
from dspark_jax.decoding.schedule import Plan, with_memory
from dspark_jax.decoding.state import DecodeState, new_state
from dspark_jax.decoding.words import round_words
from dspark_jax.models import family
from dspark_jax.models.params import Tree
from dspark_jax.processes import put
from dspark_jax.scheduling.policy import Scheduled
from dspark_jax.spec import Spec

logger = logging.getLogger(__name__)


class Programs:
    """The compile table of one model.

    Attributes:
      seconds: time spent compiling so far.
      equivalence: which evaluations give the same bits; None until it is asked for.
    """

    def __init__(self, spec: Spec, stacked: bool):
        """An empty table; programs are compiled when their bucket is first met."""
        self._spec = spec
        self._stacked = stacked
        self._compiled: dict[tuple, Callable[..., Any]] = {}
        self.seconds = 0.0
        self.equivalence: Equivalence | None = None

    @property
    def count(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    @property
    def keys(self) -> list[tuple]:
        """The buckets compiled so far."""
        return list(self._compiled)

    def init(self, batch: int, capacity: int, draft_length: int) -> DecodeState:
        """An empty state."""

        def make() -> DecodeState:
            return new_state(self._spec, batch, capacity, draft_length, self._stacked)

        key = ("init", batch, capacity, draft_length)
        return self._call(key, make, (), ())

    def feed(
        self,
        params: Tree,
        state: DecodeState,
        logits: jax.Array,
        tokens: Any,
        lengths: Any,
    ) -> tuple[DecodeState, jax.Array]:
        """See `prefill.feed`; state and logits are donated."""

        def run(params, state, logits, tokens, lengths):
            return feed(self._spec, params, state, logits, tokens, lengths)

        drafting = state.draft is not None
        steps = state.counters.kept.shape[1]
        key = ("feed", tokens.shape[0], state.capacity, drafting, steps)
        args = (params, state, logits, tokens, lengths)
        return self._call((*key, tokens.shape[1]), run, args, (1, 2))

    def begin(
        self,
        params: Tree,
        state: DecodeState,
        logits: jax.Array,
        requests: Requests,
        noisy: bool = False,
        policy: Scheduled | None = None,
        masks: Any = None,
    ) -> tuple[DecodeState, RoundOut]:
        """See `prefill.begin`; state is donated, and has a memory for a policy."""
        n = state.counters.kept.shape[1]

        def run(params, state, logits, requests, masks):
            words = round_words(requests.seeds, state.length, n, noisy)
            state, out = begin(
                self._spec,
                params,
                state,
                logits,
                requests,
                words,
                n,
                "noisy_filtered" if noisy else "filtered",
                Extras(logprobs=True),
                masks,
            )
            if policy is not None:
                state = with_memory(self._spec, policy, state, requests)
                assert state.memory is not None
                out = dataclasses.replace(out, offer=state.memory.newest)
            return state, _telling(state, out, masks)

        key = ("begin", state.anchor.shape[0], state.capacity, n, noisy)
        key = key if policy is None else (*key, policy)
        key = key if masks is None else (*key, "masked")
        return self._call(key, run, (params, state, logits, requests, masks), (1,))

    def round(
        self,
        params: Tree,
        state: DecodeState,
        requests: Requests,
        variant: Variant,
        extras: Extras,
        plan: Plan | None = None,
        masks: Any = None,
        bucket: int | None = None,
    ) -> tuple[DecodeState, RoundOut]:
        """See `round.decode_round`; state is donated."""
        n = state.counters.kept.shape[1]

        def run(params, state, requests, plan, masks):
            words = round_words(requests.seeds, state.length + 1, n, is_noisy(variant))
            state, out = decode_round(
                self._spec,
                params,
                state,
                requests,
                words,
                n,
                variant,
                extras,
                plan,
                masks,
                bucket,
            )
            return state, _telling(state, out, masks)

        key = ("round", state.anchor.shape[0], state.capacity, n, variant, extras)
        if plan is not None:
            key = (*key, plan.policy, plan.buckets, plan.total is None)
        elif bucket not in (None, self._spec.bucket(state.anchor.shape[0], n)):
            key = (*key, bucket)
        key = key if masks is None else (*key, "masked")
        return self._call(key, run, (params, state, requests, plan, masks), (1,))

    def insert(
        self, state: DecodeState, part: DecodeState, row: int, place: int
    ) -> DecodeState:
        """See `joining.insert`; state is donated."""
        sizes = state.anchor.shape[0], part.anchor.shape[0]
        n, kept = state.counters.kept.shape[1], (state.proposal, state.memory)
        key = ("insert", *sizes, state.capacity, n, jax.tree.structure(kept))
        at = [jnp.asarray(np.int32(i)) for i in (row, place)]
        run = functools.partial(insert, self._spec)
        return self._call(key, run, (state, part, *at), (0,))

    def fetch(self, results: Any) -> Any:
        """Results of a program as numpy arrays; waits for them."""
        return jax.device_get(results)

    def grow(self, state: DecodeState, capacity: int) -> DecodeState:
        """The same state with room for `capacity` positions."""
        spec = self._spec
        sizes = state.capacity, capacity

        def run(state: DecodeState) -> DecodeState:
            context = state.draft
            if spec.draft is not None and context is not None:
                context = family.draft_of(spec.draft).grown(spec.draft, context, *sizes)
            target = family.target_of(spec.target)
            return DecodeState(
                target=target.grown(spec.target, state.target, *sizes),
                draft=context,
                proposal=state.proposal,
                anchor=state.anchor,
                length=state.length,
                budget=state.budget,
                finish=state.finish,
                counters=state.counters,
                capacity=capacity,
            )

        n = state.counters.kept.shape[1]
        key = ("grow", state.anchor.shape[0], state.capacity, capacity, n)
        return self._call(key, run, (state,), ())

    def _call(
        self, key: tuple, run: Callable[..., Any], args: tuple, donated: tuple[int, ...]
    ) -> Any:
        spec, placed = self._spec, run
        if spec.mesh is not None:
            # Parameters lie where they are; the rest goes where it was compiled for.
            given = args[:1] if len(args) > 1 else ()
            rest = args[len(given) :]
            args = (*given, *put(rest, places(spec, rest)))

            def placed(*args: Any) -> Any:
                out = run(*args)
                return jax.lax.with_sharding_constraint(out, places(spec, out))

        program = self._compiled.get(key)
        if program is None:
            began = time.perf_counter()
            program = jax.jit(placed, donate_argnums=donated).lower(*args).compile()
            took = time.perf_counter() - began
            self.seconds += took
            self._compiled[key] = program
            logger.info("compiled %s in %.1f s", key, took)
        return program(*args)


def _telling(state: DecodeState, out: RoundOut, masks: Any) -> RoundOut:
    """With masks the host needs the next drafts' ids."""
    if masks is None or state.proposal is None:
        return out
    return dataclasses.replace(out, proposed=state.proposal.ids)
