"""The next proposal of a batch, drawn from its committed context."""

from __future__ import annotations

import jax

from dspark_jax.decoding import laws
from dspark_jax.decoding.requests import Requests, Variant
from dspark_jax.decoding.state import DecodeState
from dspark_jax.models.draft.proposal import Proposal, propose
from dspark_jax.models.params import Tree
from dspark_jax.spec import Spec


def draft_next(
    spec: Spec,
    params: Tree,
    state: DecodeState,
    requests: Requests,
    words: jax.Array,
    draft_length: int,
    variant: Variant,
) -> Proposal | None:
    """Drafts `draft_length` tokens after every anchor; None when it is 0.

    Args:
      spec: the model.
      params: its parameters.
      state: committed state; the draft's cache holds all positions before the
        anchor.
      requests: settings; drafts pass the same temperature and filters as the
        rows that will judge them.
      words: uint32[B, n], or uint32[B, n, 2] of shared noise.
      draft_length: n.
      variant: what the program can do.
    """
    if spec.draft is None or draft_length == 0:
        return None
    if state.draft is None:
        raise ValueError(
            "the state was made without drafting and holds no draft context; start "
            "a new one, or go on with `draft_length=0`"
        )

    def choose(logits: jax.Array, word: jax.Array):
        ids = params["draft"].get("d2t")
        return laws.choose(spec, variant, logits, requests, word, ids)

    proposal, _ = propose(
        spec.draft,
        params["draft"],
        params["target"],
        state.draft,
        state.capacity,
        state.anchor,
        state.length,
        words[:, :draft_length],
        choose,
        unroll=variant == "greedy",
        mesh=spec.mesh,
    )
    return proposal
