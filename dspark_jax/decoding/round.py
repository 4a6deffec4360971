"""One round: verify the waiting proposal, publish, commit, propose again.

    rows -> target.verify -> verdicts -> publish -> commit -> inject -> propose

A round is a pure function of parameters, state and random words.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dspark_jax.decoding import schedule
from dspark_jax.decoding.drafting import draft_next
from dspark_jax.decoding.extras import NOTHING, Extras
from dspark_jax.decoding.judging import Judged, Wanted, judge, judge_in_buckets
from dspark_jax.decoding.masks import check_masks
from dspark_jax.decoding.one_by_one import judge_one_by_one
from dspark_jax.decoding.publishing import RoundOut, RoundTrace, settle
from dspark_jax.decoding.requests import Requests, Variant, holds_rows
from dspark_jax.decoding.schedule import Plan
from dspark_jax.decoding.state import RUNNING, DecodeState
from dspark_jax.decoding.words import RoundWords
from dspark_jax.models import family
from dspark_jax.models.draft.proposal import Proposal
from dspark_jax.models.params import Tree
from dspark_jax.models.rows import packed_rows, uniform_rows
from dspark_jax.scheduling import decide
from dspark_jax.spec import Spec


def decode_round(
    spec: Spec,
    params: Tree,
    state: DecodeState,
    requests: Requests,
    words: RoundWords,
    draft_length: int,
    variant: Variant,
    extras: Extras = NOTHING,
    plan: Plan | None = None,
    masks: jax.Array | None = None,
    bucket: int | None = None,
) -> tuple[DecodeState, RoundOut]:
    """Runs one round for the whole batch.

    Args:
      spec: the model.
      params: `{"target": ..., "draft": ...}`.
      state: with a proposal of at least `draft_length` tokens, if that is > 0.
      requests: settings.
      words: random words of the committed length `state.length + 1`.
      draft_length: n, the most drafts that a request verifies; 0 decodes plainly.
      variant: what the program can do.
      extras: what is wanted beside tokens.
      plan: how many of them each request verifies, for a state with a memory; None:
        all of them.
      masks: uint32[B, n + 1, ceil(V / 32)]. Bit i % 32 of word i // 32 set: token i
        is allowed. Mask j is for the row that judges draft j, or for the fresh row
        behind j drafts: what may follow the anchor and the first j drafts. It sets
        the target's logits to -inf before temperature and filters; the draft's law
        and log-probabilities stay unmasked. Behind a draft that its own mask excludes
        nothing is emitted, and any mask will do. A row that allows nothing gives the
        token -1. None: every token everywhere, at no cost.
      bucket: G without a plan, at least `spec.bucket`; None: that.

    Returns:
      (state, what was emitted).

    Raises:
      ValueError: masks of another shape or type.
    """
    n, batch = draft_length, state.anchor.shape[0]
    if masks is not None:
        check_masks(spec, masks, batch, n + 1)
    proposal = _first(state.proposal, n) if n else None
    ids = jnp.zeros((batch, 0), jnp.int32) if proposal is None else proposal.ids
    block = jnp.concatenate([state.anchor[:, None], ids], axis=1)
    wanted = Wanted(
        features=n > 0,
        scores=extras.logprobs,
        doubt=plan is not None and plan.policy.minds_doubt,
    )
    row_judge = functools.partial(
        judge,
        spec,
        params,
        capacity=state.capacity,
        requests=requests,
        variant=variant,
        wanted=wanted,
    )
    one = functools.partial(
        row_judge,
        cache=state.target,
        proposal=proposal,
        words=words,
        masks=masks,
    )
    committed = None
    if spec.one_by_one and proposal is not None:
        assert plan is None, "see plans.policy_length"
        counts = jnp.where(state.finish == RUNNING, n + 1, 0).astype(jnp.int32)
        rows = uniform_rows(block, counts, state.length, spec.width, batch * (n + 1))
        n_drafts = jnp.full((batch,), n, jnp.int32)
        judged, committed = judge_one_by_one(
            spec, state, proposal, requests, words, masks, row_judge
        )
    elif plan is None:
        counts = jnp.where(state.finish == RUNNING, n + 1, 0).astype(jnp.int32)
        bucket = bucket or spec.bucket(batch, n)
        rows = uniform_rows(block, counts, state.length, spec.width, bucket)
        n_drafts = jnp.full((batch,), n, jnp.int32)
        judged = one(rows=rows, is_verify=rows.local_step < n)
    else:
        assert state.memory is not None
        counts = decide.lengths(
            plan.policy,
            plan.costs,
            state.memory,
            state.finish == RUNNING,
            holds_rows(variant),
            plan.total,
        )
        rows = packed_rows(block, counts, state.length, spec.width, plan.buckets[-1])
        n_drafts = jnp.maximum(counts - 1, 0)
        is_verify = rows.local_step < n_drafts[rows.request]
        judged = judge_in_buckets(plan.buckets, counts.sum(), rows, is_verify, one)

    def by_request(x: jax.Array) -> jax.Array:
        if plan is None:
            return x[: batch * (n + 1)].reshape(batch, n + 1)
        return rows.pad(x)[:, : n + 1]

    start, before = state.length, state.counters
    state, out = settle(
        state,
        by_request(judged.verdict.accept),
        by_request(judged.verdict.token),
        ids,
        n_drafts,
        requests.stop_ids,
    )
    if committed is not None:
        # Every row that was evaluated emitted a token.
        seen = before.verified_rows + out.n_emitted
        judged_drafts = jnp.minimum(out.n_emitted, n)
        counters = dataclasses.replace(
            state.counters,
            verified_rows=seen,
            drafted=before.drafted + judged_drafts,
            proposed=before.proposed + _first_ones(judged_drafts, n),
        )
        state = dataclasses.replace(state, counters=counters)
        out = dataclasses.replace(out, n_drafts=judged_drafts)
    out = _with_extras(out, extras, spec, variant, judged, by_request, proposal)
    # Ordered behind the last read, the caches are written in place.
    start = _behind(start, out.n_emitted)
    cache, context, pending, start = jax.lax.optimization_barrier(
        (state.target, state.draft, judged.pending, start, out.n_emitted)
    )[:4]
    if committed is None:
        committed = family.target_of(spec.target).commit(
            spec.target, cache, pending, start, out.n_emitted
        )
    state = dataclasses.replace(state, target=committed, draft=context)
    if n and spec.draft is not None and state.draft is not None:
        context = family.draft_of(spec.draft).inject(
            spec.draft,
            params["draft"],
            state.draft,
            judged.features,
            rows,
            out.n_emitted,
        )
        state = dataclasses.replace(state, draft=context)
        at = out.n_emitted.reshape(batch, *[1] * (words.draft.ndim - 1))
        draft_words = jnp.take_along_axis(words.draft, at, axis=1)[:, 0]
        again = functools.partial(
            draft_next, spec, params, state, requests, draft_words, n, variant
        )
        if plan is None or state.memory is None:
            state = dataclasses.replace(state, proposal=again())
        else:
            memory = decide.remember(plan.policy, state.memory, counts, out.n_kept)
            doubt = None
            if judged.doubt is not None:
                last, each = out.n_emitted[:, None] - 1, by_request(judged.doubt)
                doubt = jnp.take_along_axis(each, last, axis=1)[:, 0]
            if plan.drafts is None:
                wants = decide.wants_draft(plan.policy, plan.costs, memory, doubt)
                drafts = jnp.any(wants & (state.finish == RUNNING))
            else:
                drafts = plan.drafts
            drafts, proposal = _next_proposal(plan, state, drafts, again)
            offer = schedule.offered(spec, state, proposal, requests)
            memory = decide.with_offer(memory, offer, drafts)
            state = dataclasses.replace(state, proposal=proposal, memory=memory)
            out = dataclasses.replace(out, offer=memory.newest)
    return state, out


def _next_proposal(
    plan: Plan,
    state: DecodeState,
    drafts: jax.Array,
    again: functools.partial[Proposal | None],
) -> tuple[jax.Array, Proposal]:
    """Whether a next proposal was made, and it; else the old one, never read."""
    old = state.proposal
    assert old is not None
    if plan.policy.may_skip_drafting:
        proposal = jax.lax.cond(drafts, again, lambda: old)
    else:
        drafts, proposal = jnp.bool_(True), again()
    assert proposal is not None
    return drafts, proposal


def _first_ones(count: jax.Array, n: int) -> jax.Array:
    """int32[B, n]: ones in the first `count` places of each row."""
    step = jnp.arange(n, dtype=jnp.int32)[None]
    return (step < count[:, None]).astype(jnp.int32)


def _first(proposal: Proposal | None, n: int) -> Proposal | None:
    """The first n drafts of a proposal."""
    if proposal is None:
        return None

    def cut(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x[:, :n]

    return Proposal(
        proposal.ids[:, :n],
        cut(proposal.weights),
        cut(proposal.offset),
        proposal.confidence[:, :n],
        proposal.generation,
    )


def _with_extras(
    out: RoundOut,
    extras: Extras,
    spec: Spec,
    variant: Variant,
    judged: Judged,
    by_request,
    proposal: Proposal | None,
) -> RoundOut:
    if extras.trace and proposal is not None and spec.draft is not None:
        n = proposal.ids.shape[1]
        # Of the proposal just verified; the next one is made later.
        trace = RoundTrace(
            proposal.confidence if spec.draft.confidence else None,
            by_request(judged.verdict.accept_prob)[:, :n]
            if holds_rows(variant)
            else None,
        )
        out = dataclasses.replace(out, trace=trace)
    if judged.scores is not None:
        scores = jnp.where(out.emitted >= 0, by_request(judged.scores), 0.0)
        out = dataclasses.replace(out, logprobs=scores)
    return out


def _behind(start: jax.Array, n_emitted: jax.Array) -> jax.Array:
    """`start`, as a number that is known only when all rows were evaluated.

    On CPU, XLA of jax 0.10 forgets the barrier and would copy the caches first.
    """
    return start + jnp.minimum(n_emitted, 0)
