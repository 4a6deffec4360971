"""Drafting: a block's tokens in order, with the rows they were drawn from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.config_draft import DraftConfig
from dspark_jax.models import family
from dspark_jax.models.params import Tree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ids", "weights", "offset", "confidence", "generation"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Proposal:
    """Drafted tokens that wait for verification.

    Attributes:
      ids: int32[B, n]. Target ids.
      weights: int32[B, n, V_draft]. The integer row each id was drawn from, after
        temperature and filters; None when every request is greedy, where the
        row is the one-hot of the id, and with shared noise.
      offset: int32[B, n]. Where each id's point lies in its interval of the row;
        None with `weights`.
      confidence: float32[B, n]. Logit of the chance that the position is
        accepted once the positions before it were; zeros without the head.
      generation: int32[B]. Committed length that the proposal was made at.
    """

    ids: jax.Array
    weights: jax.Array | None
    offset: jax.Array | None
    confidence: jax.Array
    generation: jax.Array


# (logits float32[B, V_draft], words uint32[B, ...]) -> (row index int32[B], the integer
# row it was drawn from and its offset there, or None and None)
Chosen = tuple[jax.Array, jax.Array | None, jax.Array | None]
Choose = Callable[[jax.Array, jax.Array], Chosen]


def propose(
    config: DraftConfig,
    params: Tree,
    target_params: Tree,
    context: family.State,
    capacity: int,
    anchor: jax.Array,
    position: jax.Array,
    words: jax.Array,
    choose: Choose,
    *,
    unroll: bool = True,
    mesh: Mesh | None = None,
) -> tuple[Proposal, jax.Array]:
    """Drafts n tokens after the anchor of every request.

    Args:
      config: the draft.
      params: its parameters.
      target_params: for the tables that the draft shares.
      context: of all positions below `position`.
      capacity: C, positions the context was made for.
      anchor: int32[B]. The last committed token.
      position: int32[B]. Its position.
      words: uint32[B, n, ...]. Random words, 1 <= n <= gamma.
      choose: picks a row index from a position's logits float32[B, V_draft]
        and its words uint32[B, ...]; see `Choose`.
      unroll: compile every position by itself, which runs a little faster; a
        loop compiles faster where choosing is a large program.
      mesh: of the model.

    Returns:
      The proposal, and the corrected logits float32[B, n, V_draft].
    """
    batch, length = words.shape[:2]
    model = family.draft_of(config)
    hidden, plain = model.block_rows(
        config, params, target_params, context, capacity, anchor, position, mesh
    )
    hidden, plain = hidden[:, :length], plain[:, :length]
    base = model.base_logits(
        config, params, target_params, hidden.reshape(batch * length, -1)
    ).reshape(batch, length, -1)
    modules = model.ends(config, params)
    markov = modules.markov if config.markov_rank else None

    def step(carry, xs):
        previous, state = carry
        row, doubtful, logits, word = xs
        embedded = None
        if markov is not None:
            embedded = markov.embed(previous)
            bias, state = markov.step(row, embedded, state)
            logits = logits + bias
        confidence = jnp.zeros((batch,), jnp.float32)
        if config.confidence:
            confidence = modules.confidence(doubtful, embedded)
        chosen, weights, offset = choose(logits, word)
        if config.draft_vocab_size is not None:
            chosen = jnp.take(params["d2t"], chosen, axis=0, mode="clip")
        return (chosen, state), (chosen, weights, offset, confidence, logits)

    start = (anchor, None if markov is None else markov.initial_state(batch))
    by_step = jax.tree.map(
        lambda x: jnp.swapaxes(x, 0, 1), (hidden, plain, base, words)
    )
    _, outs = jax.lax.scan(step, start, by_step, unroll=length if unroll else 1)
    ids, weights, offset, confidence, corrected = jax.tree.map(
        lambda x: jnp.swapaxes(x, 0, 1), outs
    )
    proposal = Proposal(ids, weights, offset, confidence, position + 1)
    return proposal, corrected


def spread(rows: jax.Array, d2t: jax.Array | None, vocab_size: int) -> jax.Array:
    """Draft rows on the target's ids: int32[R, V_draft] -> int32[R, V].

    Ids outside the draft's vocabulary have weight 0. `d2t` is injective, so a token
    keeps its weight, and an offset inside its interval stays one.
    """
    if d2t is None:
        return rows
    missing = rows.shape[-1]
    order = jnp.arange(missing, dtype=jnp.int32)
    t2d = jnp.full((vocab_size,), missing, jnp.int32).at[d2t].set(order)
    return jnp.take(rows, t2d, axis=1, mode="fill", fill_value=0)
