"""The serving path in pieces: prefill and rounds, with words of one's own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax as dspark
from dspark_jax.decoding.extras import Extras
from dspark_jax.decoding.prefill import begin, feed
from dspark_jax.decoding.requests import Requests
from dspark_jax.decoding.round import decode_round
from dspark_jax.decoding.state import DecodeState, new_state
from dspark_jax.decoding.words import RoundWords
from tests.models.quick import quick_jit


def requests_for(
    *sampling: dspark.SamplingParams, seeds: np.ndarray | None = None
) -> Requests:
    """One request each; without stop ids unless the settings name some."""
    if seeds is None:
        seeds = np.zeros((len(sampling), 2), np.uint32)
    return dspark.pack_requests(sampling, seeds, ())


def no_words(batch: int, n: int) -> RoundWords:
    """Words for greedy programs, which read none."""
    return RoundWords(
        fresh=jnp.zeros((batch, n + 1), jnp.uint32),
        draft=jnp.zeros((batch, n + 2, n), jnp.uint32),
    )


def prefill(
    spec: dspark.Spec,
    params: dict,
    tokens: jax.Array,
    lengths: jax.Array,
    budget: jax.Array,
    requests: Requests,
    words: RoundWords,
    n: int,
    variant: str,
    capacity: int,
) -> tuple:
    """(state, RoundOut of the first token) from an empty cache."""
    batch = tokens.shape[0]
    state = new_state(spec, batch, capacity, n, stacked=False)
    state = dataclasses.replace(state, budget=budget)
    logits = jnp.zeros((batch, spec.target.vocab_size), jnp.float32)
    state, logits = feed(spec, params, state, logits, tokens, lengths)
    return begin(spec, params, state, logits, requests, words, n, variant)


STATIC = ("spec", "n", "variant", "capacity")
quick_prefill = functools.partial(quick_jit, static_argnames=STATIC)(prefill)


@functools.partial(quick_jit, static_argnums=(0, 5, 6))
def quick_round(
    spec: dspark.Spec,
    params: dict,
    state: DecodeState,
    requests: Requests,
    words: RoundWords,
    n: int,
    variant: str,
) -> tuple:
    """`decode_round`, compiled, with a trace."""
    extras = Extras(trace=True)
    return decode_round(spec, params, state, requests, words, n, variant, extras)


@dataclasses.dataclass
class Row:
    """What one request did: tokens, and by round its start, drafts and trace."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    start: list[int] = dataclasses.field(default_factory=list)
    kept: list[int] = dataclasses.field(default_factory=list)
    drafts: list[list[int]] = dataclasses.field(default_factory=list)
    confidence: list[np.ndarray] = dataclasses.field(default_factory=list)
    traced: list[np.ndarray] = dataclasses.field(default_factory=list)
    finish: int = 0


def greedy_rounds(
    model: dspark.Model,
    tokens: jax.Array,
    lengths: jax.Array,
    budgets: np.ndarray,
    requests: Requests,
    n: int,
    capacity: int,
) -> list[Row]:
    """Decodes greedily with the round function, round by round."""
    batch = tokens.shape[0]
    words = no_words(batch, n)
    budgets = jnp.asarray(budgets, jnp.int32)
    args = (model.spec, model.params, tokens, lengths, budgets, requests, words)
    state, out = quick_prefill(*args, n=n, variant="greedy", capacity=capacity)
    rows = [Row() for _ in range(batch)]
    while True:
        for i, row in enumerate(rows):
            row.tokens += np.asarray(out.emitted)[i, : out.n_emitted[i]].tolist()
            if out.n_emitted[i] and out.emitted.shape[1] > 1:
                row.kept.append(int(out.n_kept[i]))
                if out.trace is not None and out.trace.confidence is not None:
                    row.traced.append(np.asarray(out.trace.confidence)[i])
            row.finish = int(out.finish[i])
        if not any(row.finish == 0 for row in rows):
            return rows
        for i, row in enumerate(rows):
            if row.finish == 0:
                row.start.append(int(state.length[i]))
                row.drafts.append(np.asarray(state.proposal.ids)[i].tolist())
                row.confidence.append(np.asarray(state.proposal.confidence)[i])
        state, out = quick_round(
            model.spec, model.params, state, requests, words, n, "greedy"
        )
