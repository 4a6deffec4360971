"""Rounds of changing shape, with drafts that are right up to a random point."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.prefill import begin, feed
from dspark_jax.decoding.requests import pack_requests
from dspark_jax.decoding.round import decode_round
from dspark_jax.decoding.words import round_words
from dspark_jax.settings import SamplingParams

BATCH, ROUNDS, CAPACITY = 3, 200, 500
TOKENS = np.tile(np.arange(16, dtype=np.int32), (BATCH, 1))
LENGTHS = np.asarray([1, 5, 12], np.int32)


def walk(model, reference, rng):
    """Runs 200 rounds.

    Returns the committed tokens, the (drafts, accepted drafts) that occurred, and
    the last state.
    """
    spec, params, gamma = model.spec, model.params, model.spec.gamma
    requests = pack_requests(
        [SamplingParams()] * BATCH, np.zeros((BATCH, 2), np.uint32), ()
    )

    @functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
    def step(state, n):
        words = round_words(requests.seeds, state.length + 1, n)
        return decode_round(spec, params, state, requests, words, n, "greedy")

    @jax.jit
    def start(state, tokens, lengths):
        logits = jnp.zeros((BATCH, spec.target.vocab_size), jnp.float32)
        state, logits = feed(spec, params, state, logits, tokens, lengths)
        words = round_words(requests.seeds, state.length, gamma)
        return begin(spec, params, state, logits, requests, words, gamma, "greedy")

    state = model.programs.init(BATCH, CAPACITY, gamma)
    state = dataclasses.replace(state, budget=jnp.full((BATCH,), 1000, jnp.int32))
    state, out = start(state, TOKENS, LENGTHS)
    committed = [row[:1].tolist() for row in np.asarray(out.emitted)]
    accepted = set()
    for _ in range(ROUNDS):
        # Right for 0..gamma tokens, then wrong.
        right = rng.integers(0, gamma + 1, BATCH)
        ids = np.zeros((BATCH, gamma), np.int32)
        for row, done in enumerate(committed):
            ids[row] = reference[row][len(done) : len(done) + gamma]
            ids[row, right[row] :] = (ids[row, right[row] :] + 1) % 128
        proposal = dataclasses.replace(state.proposal, ids=jnp.asarray(ids))
        state = dataclasses.replace(state, proposal=proposal)
        n = int(rng.integers(0, gamma + 1))
        state, out = step(state, n)
        emitted, counts = np.asarray(out.emitted), np.asarray(out.n_emitted)
        for row, done in enumerate(committed):
            accepted.add((n, int(counts[row]) - 1))
            done += emitted[row, : counts[row]].tolist()
    return committed, accepted, state


def reference_tokens(model):
    @jax.jit
    def run(params):
        out = dspark.generate_tokens(
            model.spec,
            params,
            TOKENS,
            LENGTHS,
            max_new_tokens=450,
            draft_length=0,
            capacity=CAPACITY,
        )
        return out.tokens

    return np.asarray(run(model.params))


@pytest.mark.slow
def test_fr30_random_walk_over_round_shapes(model):
    reference = reference_tokens(model)
    rng = np.random.default_rng(0)
    committed, accepted, state = walk(model, reference, rng)
    for row, done in enumerate(committed):
        assert len(done) > ROUNDS
        assert done == reference[row, : len(done)].tolist()
    # Every number of accepted drafts occurred at every shape.
    assert accepted == {(n, k) for n in (0, 1, 2) for k in range(n + 1)}
    for leaf in jax.tree.leaves((state.target, state.draft)):
        assert np.isfinite(np.asarray(leaf)).all()
    assert np.asarray(state.length).tolist() == [
        int(n) + len(done) - 1 for n, done in zip(LENGTHS, committed, strict=True)
    ]
