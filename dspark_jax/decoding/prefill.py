"""Round 0: prompt tokens into the caches, the first token, the first proposal."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.decoding import laws
from dspark_jax.decoding.drafting import draft_next
from dspark_jax.decoding.extras import NOTHING, Extras
from dspark_jax.decoding.masks import check_masks, masked
from dspark_jax.decoding.publishing import RoundOut, settle
from dspark_jax.decoding.requests import Requests, Variant
from dspark_jax.decoding.state import DecodeState
from dspark_jax.decoding.words import RoundWords
from dspark_jax.models import family
from dspark_jax.models.params import Tree
from dspark_jax.models.rows import dense_rows
from dspark_jax.spec import Spec


def feed(
    spec: Spec,
    params: Tree,
    state: DecodeState,
    logits: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """Feeds one chunk of prompt tokens.

    Args:
      spec: the model.
      params: its parameters.
      state: caches that hold everything before the chunk.
      logits: float32[B, V]. Row after the last token fed so far.
      tokens: int32[B, P]. Right-padded.
      lengths: int32[B]. Real tokens, 0..P. Every request's block must fit, see
        `family.Target.chunk_fits`.

    Returns:
      (state with the chunk cached, logits of the row after each request's last
      fed token).
    """
    rows = dense_rows(tokens, lengths, state.length)
    batch, width = tokens.shape
    last = jnp.arange(batch, dtype=jnp.int32) * width + jnp.maximum(lengths - 1, 0)
    taps = spec.taps if state.draft is not None else ()
    target = family.target_of(spec.target)
    fresh, features, pending = target.evaluate(
        spec.target,
        params["target"],
        state.target,
        state.capacity,
        rows,
        taps,
        last,
        spec.mesh,
    )
    fresh = spec.shard(fresh, "batch", "vocab")
    draft = state.draft
    if spec.draft is not None and draft is not None:
        draft = family.draft_of(spec.draft).inject(
            spec.draft, params["draft"], draft, features, rows, lengths
        )
    state = dataclasses.replace(
        state,
        target=target.commit(spec.target, state.target, pending, rows.start, lengths),
        draft=draft,
        length=state.length + lengths,
    )
    return state, jnp.where((lengths > 0)[:, None], fresh, logits)


def begin(
    spec: Spec,
    params: Tree,
    state: DecodeState,
    logits: jax.Array,
    requests: Requests,
    words: RoundWords,
    draft_length: int,
    variant: Variant,
    extras: Extras = NOTHING,
    masks: jax.Array | None = None,
) -> tuple[DecodeState, RoundOut]:
    """Draws the token after the prompt and makes the first proposal.

    Args:
      spec: the model.
      params: its parameters.
      state: the fed prompt; `budget` set, `finish` 0.
      logits: float32[B, V]. Row after each prompt.
      requests: settings.
      words: of committed length `state.length`.
      draft_length: n, drafts a round.
      variant: what the program can do.
      extras: what is wanted beside tokens; no draft was verified yet, so there is
        no trace.
      masks: uint32[B, ceil(V / 32)]. Tokens that may come first, as in
        `round.decode_round`; None: all.
    """
    lawful = logits
    if masks is not None:
        check_masks(spec, masks, logits.shape[0])
        lawful = masked(spec, logits, masks)
    token, _, _ = laws.choose(spec, variant, lawful, requests, words.fresh[:, 0])
    batch = token.shape[0]
    state, out = settle(
        state,
        accept=jnp.ones((batch, 1), bool),
        token=token[:, None],
        draft_ids=jnp.zeros((batch, 0), jnp.int32),
        n_drafts=jnp.zeros((batch,), jnp.int32),
        stop_ids=requests.stop_ids,
        # The anchor itself is not cached yet.
        cached=0,
    )
    if extras.logprobs:
        scores = laws.log_probabilities(logits, out.emitted[:, 0])[:, None]
        out = dataclasses.replace(out, logprobs=scores)
    proposal = draft_next(
        spec, params, state, requests, words.draft[:, 1], draft_length, variant
    )
    return dataclasses.replace(state, proposal=proposal), out
