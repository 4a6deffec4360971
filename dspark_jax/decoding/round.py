"""One round: verify the waiting proposal, publish, commit, propose again.

    rows -> target.verify -> verdicts -> publish -> commit -> inject -> propose

A round is a pure function of parameters, state and random words.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.decoding import laws
from dspark_jax.decoding.drafting import draft_next
from dspark_jax.decoding.extras import NOTHING, Extras
from dspark_jax.decoding.publishing import RoundOut, RoundTrace, settle
from dspark_jax.decoding.requests import Requests, Variant, holds_rows
from dspark_jax.decoding.state import RUNNING, DecodeState
from dspark_jax.decoding.words import RoundWords
from dspark_jax.models import dense
from dspark_jax.models.draft import backbone
from dspark_jax.models.draft.proposal import Proposal, spread
from dspark_jax.models.params import Tree
from dspark_jax.models.rows import Rows, uniform_rows
from dspark_jax.spec import Spec
from pallas_kernels.verify import VerifiedRows


def decode_round(
    spec: Spec,
    params: Tree,
    state: DecodeState,
    requests: Requests,
    words: RoundWords,
    draft_length: int,
    variant: Variant,
    extras: Extras = NOTHING,
) -> tuple[DecodeState, RoundOut]:
    """Runs one round for the whole batch.

    Args:
      spec: the model.
      params: `{"target": ..., "draft": ...}`.
      state: with a proposal of at least `draft_length` tokens, if that is > 0.
      requests: settings.
      words: random words of the committed length `state.length + 1`.
      draft_length: n, drafts that every request verifies; 0 decodes plainly.
      variant: what the program can do.
      extras: what is wanted beside tokens.

    Returns:
      (state, what was emitted).
    """
    n, batch = draft_length, state.anchor.shape[0]
    proposal = state.proposal if n else None
    ids = jnp.zeros((batch, 0), jnp.int32) if proposal is None else proposal.ids[:, :n]
    rows = uniform_rows(
        tokens=jnp.concatenate([state.anchor[:, None], ids], axis=1),
        lengths=jnp.where(state.finish == RUNNING, n + 1, 0).astype(jnp.int32),
        start=state.length,
        width=spec.width,
        bucket=spec.bucket(batch, n),
    )
    taps = spec.taps if n else ()
    logits, features, pending = dense.evaluate(
        spec.target, params["target"], state.target, state.capacity, rows, taps
    )
    logits = spec.shard(logits, "batch", "vocab")
    verdict = _judge(spec, variant, params, logits, requests, rows, proposal, n, words)

    def by_request(x: jax.Array) -> jax.Array:
        return x[: batch * (n + 1)].reshape(batch, n + 1)

    start = state.length
    state, out = settle(
        state,
        by_request(verdict.accept),
        by_request(verdict.token),
        ids,
        requests.stop_ids,
    )
    if extras.trace and proposal is not None and spec.draft is not None:
        head, rows_kept = spec.draft.confidence, holds_rows(variant)
        # Of the proposal just verified; the next one is made below.
        trace = RoundTrace(
            proposal.confidence[:, :n] if head else None,
            by_request(verdict.accept_prob)[:, :n] if rows_kept else None,
        )
        out = dataclasses.replace(out, trace=trace)
    if extras.logprobs:
        flat = out.emitted.reshape(-1)
        scores = laws.log_probabilities(logits[: flat.shape[0]], flat)
        out = dataclasses.replace(out, logprobs=by_request(scores))
    # Ordered behind the last read, the caches are written in place.
    start = _behind(start, out.n_emitted)
    cache, context, pending, start = jax.lax.optimization_barrier(
        (state.target, state.draft, pending, start, out.n_emitted)
    )[:4]
    state = dataclasses.replace(
        state, target=dense.commit(cache, pending, start), draft=context
    )
    if n and spec.draft is not None and state.draft is not None:
        context = backbone.inject(
            spec.draft, params["draft"], state.draft, features, rows
        )
        state = dataclasses.replace(state, draft=context)
        at = out.n_emitted.reshape(batch, *[1] * (words.draft.ndim - 1))
        draft_words = jnp.take_along_axis(words.draft, at, axis=1)[:, 0]
        proposal = draft_next(spec, params, state, requests, draft_words, n, variant)
        state = dataclasses.replace(state, proposal=proposal)
    return state, out


def _behind(start: jax.Array, n_emitted: jax.Array) -> jax.Array:
    """`start`, as a number that is known only when all rows were evaluated.

    On CPU, XLA of jax 0.10 forgets the barrier and would copy the caches first.
    """
    return start + jnp.minimum(n_emitted, 0)


def _judge(
    spec: Spec,
    variant: Variant,
    params: Tree,
    logits: jax.Array,
    requests: Requests,
    rows: Rows,
    proposal: Proposal | None,
    n: int,
    words: RoundWords,
) -> VerifiedRows:
    """Verdicts on flat rows; each row finds its draft by request and step."""
    is_verify = rows.local_step < n
    fresh = words.fresh[rows.request, rows.local_step]
    if proposal is None or spec.draft is None:
        ids, drawn = jnp.full_like(rows.token, -1), None
    else:
        slot = rows.request * n + jnp.minimum(rows.local_step, n - 1)

        def flat(x: jax.Array) -> jax.Array:
            return x[:, :n].reshape(-1, *x.shape[2:])

        def per_row(x: jax.Array) -> jax.Array:
            return jnp.take(flat(x), slot, axis=0, mode="clip")

        ids, drawn = per_row(proposal.ids), None
        if proposal.weights is not None and proposal.offset is not None:
            d2t = params["draft"].get("d2t")
            drafted = spread(flat(proposal.weights), d2t, spec.target.vocab_size)
            drawn = (drafted, slot, per_row(proposal.offset))
    return laws.verify(
        spec, variant, logits, requests, rows.request, ids, drawn, is_verify, fresh
    )
