"""A draft that is the plain continuation is accepted whole; a spoilt one is not.

And what a draft depends on: its anchor, its context and where the context lies.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.models.draft import backbone
from dspark_jax.models.draft.proposal import Proposal, propose
from dspark_jax.models.kv_cache import empty_cache
from dspark_jax.models.rows import dense_rows
from pallas_kernels import argmax_ids
from tests.decoding.scripts import (
    chain_model,
    generate,
    line,
    stopping_at,
    with_draft_ids,
)
from tests.decoding.serving import no_words, quick_prefill, quick_round, requests_for
from tests.models.goldens import right_padded
from tests.models.quick import quick_jit

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7], [30, 31]]
BATCH, GAMMA, NEW, CAPACITY = 4, 4, 20, 32


@pytest.fixture(scope="module")
def model():
    return dspark.testing.tiny_model("qwen3", seed=3)


@pytest.fixture(scope="module")
def requests():
    return requests_for(*[dspark.SamplingParams()] * BATCH)


@pytest.fixture(scope="module")
def plain(model):
    """int32[B, NEW]. The plain greedy continuation."""
    tokens, lengths = right_padded(PROMPTS)
    run = quick_jit(
        lambda params, *prompt: dspark.generate_tokens(
            model.spec, params, *prompt, max_new_tokens=NEW, draft_length=0
        )
    )
    return np.asarray(run(model.params, tokens, lengths).tokens)


@pytest.fixture(scope="module")
def begun(model, requests):
    tokens, lengths = right_padded(PROMPTS)
    budget = jnp.full((BATCH,), NEW, jnp.int32)
    args = (model.spec, model.params, tokens, lengths, budget, requests)
    state, out = quick_prefill(
        *args, no_words(BATCH, GAMMA), n=GAMMA, variant="greedy", capacity=CAPACITY
    )
    return state, np.asarray(out.emitted)[:, 0]


def with_drafts(state, ids):
    old = state.proposal
    proposal = Proposal(jnp.asarray(ids), None, None, old.confidence, old.generation)
    return dataclasses.replace(state, proposal=proposal)


@pytest.mark.parametrize(
    "n",
    [
        1,
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.slow),
        GAMMA,
    ],
)
def test_perfect_drafts_are_accepted_whole(model, requests, plain, begun, n):
    state, first = begun
    assert (first == plain[:, 0]).all()
    at = 1
    while at + n + 1 <= NEW:
        # A proposal may be longer than what is verified of it.
        drafts = np.zeros((BATCH, GAMMA), np.int32)
        drafts[:, :n] = plain[:, at : at + n]
        state, out = quick_round(
            model.spec, model.params, with_drafts(state, drafts), requests,
            no_words(BATCH, n), n, "greedy",
        )  # fmt: skip
        assert (np.asarray(out.n_kept) == n).all()
        assert (np.asarray(out.emitted) == plain[:, at : at + n + 1]).all()
        at += n + 1
    assert at > 2 * (n + 1)


@pytest.mark.parametrize("spoilt", range(GAMMA))
def test_a_spoilt_draft_is_kept_up_to_there(model, requests, plain, begun, spoilt):
    state, _ = begun
    drafts = plain[:, 1 : GAMMA + 1].copy()
    drafts[:, spoilt] = (drafts[:, spoilt] + 1) % model.spec.target.vocab_size
    _, out = quick_round(
        model.spec, model.params, with_drafts(state, drafts), requests,
        no_words(BATCH, GAMMA), GAMMA, "greedy",
    )  # fmt: skip
    assert (np.asarray(out.n_kept) == spoilt).all()
    emitted = np.asarray(out.emitted)[:, : spoilt + 1]
    assert (emitted == plain[:, 1 : spoilt + 2]).all()


def test_two_blocks_with_one_accepted_prefix_go_on_alike(model, requests, plain, begun):
    """What was rejected leaves no trace in what follows."""
    state, _ = begun
    ends = []
    for rubbish in (17, 200):
        drafts = plain[:, 1 : GAMMA + 1].copy()
        drafts[:, 2:] = rubbish
        after, _ = quick_round(
            model.spec, model.params, with_drafts(state, drafts), requests,
            no_words(BATCH, GAMMA), GAMMA, "greedy",
        )  # fmt: skip
        proposal = jax.tree.map(np.asarray, after.proposal)
        after, out = quick_round(
            model.spec, model.params, after, requests, no_words(BATCH, GAMMA), GAMMA,
            "greedy",
        )  # fmt: skip
        ends.append((proposal, np.asarray(out.emitted)))
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_drafts_depend_on_anchor_context_and_positions(model):
    spec, params = model.spec, model.params
    config, rng = spec.draft, np.random.default_rng(0)
    length, width = 9, len(config.target_layer_ids) * spec.target.hidden_size
    features = rng.normal(size=(length, width)).astype(np.float32)
    noise = features.copy()
    noise[4] += 1
    # The same rows at other positions.
    moved = np.roll(features, 1, axis=0)
    batch = np.stack([features, features, noise, moved, features])

    @quick_jit
    def draft(params, features, anchor):
        count = features.shape[0]
        start = jnp.zeros((count,), jnp.int32)
        cache = empty_cache(
            config.backbone, count, CAPACITY, jnp.dtype("float32"), False
        )
        rows = dense_rows(jnp.zeros((count, length), jnp.int32), start + length, start)
        flat = features.reshape(count * length, -1)
        cache = backbone.inject(
            config, params["draft"], cache, flat, rows, start + length
        )
        words = jnp.zeros((count, config.gamma), jnp.uint32)
        return propose(
            config, params["draft"], params["target"], cache, CAPACITY, anchor,
            start + length, words,
            lambda logits, word: (argmax_ids(logits), None, None),
        )  # fmt: skip

    anchor = np.asarray([5, 6, 5, 5, 5], np.int32)
    proposal, logits = jax.tree.map(np.asarray, draft(params, batch, anchor))
    assert (logits[4] == logits[0]).all()
    for row, what in enumerate(("anchor", "context", "positions"), start=1):
        for position in range(config.gamma):
            change = np.abs(logits[row, position] - logits[0, position]).max()
            assert change > 1e-3, f"{what}, position {position}"
        assert (proposal.confidence[row] != proposal.confidence[0]).all()


def test_a_reduced_vocabulary_goes_on_from_the_targets_ids():
    """The head's next row belongs to the drafted token, not to its place in it."""
    after = line(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    model = chain_model(after, gamma=GAMMA)
    ids = np.arange(15, 0, -1, dtype=np.int32)
    reduced = with_draft_ids(model, ids)
    out = generate(reduced, [[1]], [stopping_at()], max_new_tokens=11)
    assert out.tokens[0].tolist() == list(range(2, 13))
    assert out.counters.rounds[0] == 2 and (out.counters.kept[0] == 2).all()
