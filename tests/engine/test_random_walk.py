"""Rounds of changing shape, with drafts that are right up to a random point."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.plans import row_buckets
from dspark_jax.decoding.prefill import begin, feed
from dspark_jax.decoding.requests import pack_requests
from dspark_jax.decoding.round import decode_round
from dspark_jax.decoding.schedule import Plan, with_memory
from dspark_jax.decoding.words import round_words
from dspark_jax.scheduling.policy import Budget, Threshold
from dspark_jax.settings import SamplingParams

BATCH, ROUNDS, CAPACITY = 3, 200, 500
TOKENS = np.tile(np.arange(16, dtype=np.int32), (BATCH, 1))
LENGTHS = np.asarray([1, 5, 12], np.int32)


def walk(model, reference, rng, shape, policy=None):
    """Runs 200 rounds.

    Args:
      model: greedy.
      reference: int[B, ...]. Plain decoding's tokens.
      rng: says where drafts go wrong.
      shape: gives each round's drafts n, lengths int[B] <= n and plan.
      policy: of the plans; None for plans that are None.

    Returns:
      The committed tokens, by round (drafts, accepted drafts) of each request, and
      the last state.
    """
    spec, params, gamma = model.spec, model.params, model.spec.gamma
    requests = pack_requests(
        [SamplingParams()] * BATCH, np.zeros((BATCH, 2), np.uint32), ()
    )

    @functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
    def step(state, n, plan):
        words = round_words(requests.seeds, state.length + 1, n)
        args = (spec, params, state, requests, words, n, "greedy")
        return decode_round(*args, plan=plan)

    @jax.jit
    def start(state, tokens, lengths):
        logits = jnp.zeros((BATCH, spec.target.vocab_size), jnp.float32)
        state, logits = feed(spec, params, state, logits, tokens, lengths)
        words = round_words(requests.seeds, state.length, gamma)
        args = (spec, params, state, logits, requests, words, gamma, "greedy")
        state, out = begin(*args)
        if policy is not None:
            state = with_memory(spec, policy, state, requests)
        return state, out

    state = model.programs.init(BATCH, CAPACITY, gamma)
    state = dataclasses.replace(state, budget=jnp.full((BATCH,), 1000, jnp.int32))
    state, out = start(state, TOKENS, LENGTHS)
    committed = [row[:1].tolist() for row in np.asarray(out.emitted)]
    seen = []
    for _ in range(ROUNDS):
        # Right for 0..gamma tokens, then wrong.
        right = rng.integers(0, gamma + 1, BATCH)
        ids = np.zeros((BATCH, gamma), np.int32)
        for row, done in enumerate(committed):
            ids[row] = reference[row][len(done) : len(done) + gamma]
            ids[row, right[row] :] = (ids[row, right[row] :] + 1) % 128
        proposal = dataclasses.replace(state.proposal, ids=jnp.asarray(ids))
        state = dataclasses.replace(state, proposal=proposal)
        n, lengths, plan = shape()
        if plan is not None:
            state = asking_for(state, lengths)
        state, out = step(state, n, plan)
        assert np.asarray(out.n_drafts).tolist() == lengths.tolist()
        emitted, counts = np.asarray(out.emitted), np.asarray(out.n_emitted)
        for row, done in enumerate(committed):
            done += emitted[row, : counts[row]].tolist()
        seen.append(list(zip(lengths.tolist(), (counts - 1).tolist(), strict=True)))
    return committed, seen, state


def asking_for(state, lengths):
    """The state with a proposal that is sure of so many drafts and of no more."""
    gamma = state.memory.newest.values.shape[1]
    values = (np.arange(gamma) < lengths[:, None]).astype(np.float32)
    newest = dataclasses.replace(state.memory.newest, values=jnp.asarray(values))
    memory = dataclasses.replace(state.memory, newest=newest)
    return dataclasses.replace(state, memory=memory)


@pytest.fixture(scope="module")
def reference(model):
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


def check(reference, committed, state):
    """Every token is plain decoding's, lengths add up, caches are finite."""
    for row, done in enumerate(committed):
        assert len(done) > ROUNDS
        assert done == reference[row, : len(done)].tolist()
    for leaf in jax.tree.leaves((state.target, state.draft)):
        assert np.isfinite(np.asarray(leaf)).all()
    assert np.asarray(state.length).tolist() == [
        int(n) + len(done) - 1 for n, done in zip(LENGTHS, committed, strict=True)
    ]


# What a request's round can be: drafts, and accepted ones among them.
PAIRS = {(n, k) for n in (0, 1, 2) for k in range(n + 1)}


@pytest.mark.slow
def test_fr30_random_walk_over_round_shapes(model, reference):
    rng = np.random.default_rng(0)

    def shape():
        n = int(rng.integers(0, model.spec.gamma + 1))
        return n, np.full(BATCH, n), None

    committed, seen, state = walk(model, reference, rng, shape)
    check(reference, committed, state)
    # Every number of accepted drafts occurred at every shape.
    assert {pair for one in seen for pair in one} == PAIRS


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Budget(), Threshold(survival=0.5)])
def test_fr30_random_walk_over_row_counts_with_lengths_of_ones_own(
    model, reference, policy
):
    """A program a row count, as the host runs them, or one that holds them all."""
    rng, gamma = np.random.default_rng(1), model.spec.gamma
    buckets, used = row_buckets(BATCH, gamma), []
    on_host = isinstance(policy, Budget)

    def shape():
        # Few drafts or many.
        lengths = rng.integers(0, rng.integers(0, gamma + 1) + 1, BATCH)
        total = BATCH + int(lengths.sum())
        bucket = next(size for size in buckets if size >= total)
        used.append((bucket, total))
        mine = (bucket,) if on_host else buckets
        rows = jnp.int32(total) if on_host else None
        drafts = jnp.bool_(True) if on_host else None
        return gamma, lengths, Plan(None, rows, policy, mine, drafts)

    committed, seen, state = walk(model, reference, rng, shape, policy)
    check(reference, committed, state)
    assert {pair for one in seen for pair in one} == PAIRS
    assert {bucket for bucket, _ in used} == set(buckets)
    # Every total, full programs and padded ones; requests of different lengths.
    assert {total for _, total in used} == set(range(BATCH, BATCH * (gamma + 1) + 1))
    assert len({tuple(n for n, _ in one) for one in seen}) > 20
