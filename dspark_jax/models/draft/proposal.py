"""Drafting: a block's tokens in order, with the rows they were drawn from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.config import DraftConfig
from dspark_jax.models.draft import backbone
from dspark_jax.models.kv_cache import Cache
from dspark_jax.models.params import Tree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ids", "probs", "confidence", "generation"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Proposal:
    """Drafted tokens that wait for verification.

    Attributes:
      ids: int32[B, n]. Target ids.
      probs: float32[B, n, V_draft]. The law each id was drawn from, after
        temperature and filters; None when every request is greedy, where the
        law is the one-hot of the id.
      confidence: float32[B, n]. Logit of the chance that the position is
        accepted once the positions before it were; zeros without the head.
      generation: int32[B]. Committed length that the proposal was made at.
    """

    ids: jax.Array
    probs: jax.Array | None
    confidence: jax.Array
    generation: jax.Array


# (logits float32[B, V_draft], step) -> (row index int32[B], law or None)
Choose = Callable[[jax.Array, int], tuple[jax.Array, jax.Array | None]]


def propose(
    config: DraftConfig,
    params: Tree,
    target_params: Tree,
    cache: Cache,
    anchor: jax.Array,
    position: jax.Array,
    length: int,
    choose: Choose,
) -> tuple[Proposal, jax.Array]:
    """Drafts `length` tokens after the anchor of every request.

    Args:
      config: the draft.
      params: its parameters.
      target_params: for the tables that the draft shares.
      cache: context of all positions below `position`.
      anchor: int32[B]. The last committed token.
      position: int32[B]. Its position.
      length: 1..gamma tokens to draft.
      choose: picks a row index from a position's logits float32[B, V_draft]
        and gives the law it used (or None); called with the local step.

    Returns:
      The proposal, and the corrected logits float32[B, length, V_draft].
    """
    hidden = backbone.block_hidden(
        config, params, target_params, cache, anchor, position
    )
    if not config.sample_from_anchor:
        hidden = hidden[:, 1:]
    hidden = hidden[:, :length]
    batch = anchor.shape[0]
    base = backbone.base_logits(
        config, params, target_params, hidden.reshape(batch * length, -1)
    ).reshape(batch, length, -1)
    modules = backbone.ends(config, params)
    markov = config.markov_rank > 0
    state = modules.markov.initial_state(batch) if markov else None
    previous, ids, laws, confidence, corrected = anchor, [], [], [], []
    for step in range(length):
        row, embedded = hidden[:, step], None
        logits = base[:, step]
        if markov:
            embedded = modules.markov.embed(previous)
            bias, state = modules.markov.step(row, embedded, state)
            logits = logits + bias
        if config.confidence:
            confidence.append(modules.confidence(row, embedded))
        chosen, law = choose(logits, step)
        if config.draft_vocab_size is not None:
            chosen = jnp.take(params["d2t"], chosen, axis=0, mode="clip")
        previous = chosen
        ids.append(chosen)
        laws.append(law)
        corrected.append(logits)
    proposal = Proposal(
        ids=jnp.stack(ids, axis=1),
        probs=None if laws[0] is None else jnp.stack(laws, axis=1),
        confidence=(
            jnp.stack(confidence, axis=1)
            if confidence
            else jnp.zeros((batch, length), jnp.float32)
        ),
        generation=position + 1,
    )
    return proposal, jnp.stack(corrected, axis=1)


def spread(probs: jax.Array, d2t: jax.Array | None, vocab_size: int) -> jax.Array:
    """Draft laws on the target's ids: float32[R, V_draft] -> float32[R, V].

    Ids outside the draft's vocabulary have probability 0. `d2t` is injective.
    """
    if d2t is None:
        return probs
    missing = probs.shape[-1]
    rows = jnp.arange(missing, dtype=jnp.int32)
    t2d = jnp.full((vocab_size,), missing, jnp.int32).at[d2t].set(rows)
    return jnp.take(probs, t2d, axis=1, mode="fill", fill_value=0)
