"""No word is drawn twice, and each draw reads the word that is its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding import programs as programs_module
from dspark_jax.decoding.extras import Extras
from dspark_jax.decoding.words import fold_seeds, round_words
from tests.decoding.serving import quick_prefill, quick_round, requests_for
from tests.models.quick import quick_jit

N, BATCH = 2, 64
TARGET_LAW = np.asarray([4.0, 1.0, 1.0]) / 6
DRAFT_LAW = np.ones(3) / 3


def test_words_differ_between_rounds_steps_purposes_and_seeds():
    seeds = fold_seeds(3, 2)
    drawn = []
    for committed in range(5, 45):
        words = round_words(seeds, jnp.full((2,), committed, jnp.int32), N)
        drawn += [words.fresh, words.draft[:, 0]]
    flat = np.concatenate([np.asarray(x).ravel() for x in drawn])
    assert len(np.unique(flat)) == len(flat)


def test_draft_words_are_those_of_the_length_that_will_be_committed():
    seeds, at = fold_seeds(3, 2), jnp.full((2,), 7, jnp.int32)
    ahead = round_words(seeds, at, N).draft
    for emitted in range(N + 2):
        then = round_words(seeds, at + emitted, N).draft[:, 0]
        np.testing.assert_array_equal(ahead[:, emitted], then)


def test_the_words_of_a_seed_are_these_for_good():
    """Other words would be as good, and another text of every seed."""
    high, low, at = 3, 5, 7
    seeds = jnp.asarray([[high, low]], jnp.uint32)
    key = jax.random.wrap_key_data(seeds[0], impl="threefry2x32")
    folded = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(3)]
    np.testing.assert_array_equal(fold_seeds((high << 32) | low, 3), folded)

    def word(position, step, purpose):
        of = functools.reduce(jax.random.fold_in, (position, step, purpose), key)
        return int(jax.random.bits(of))

    words = round_words(seeds, jnp.asarray([at], jnp.int32), N)
    fresh = [word(at, step, 0) for step in range(N + 1)]
    draft = [[word(at + k, step, 1) for step in range(N)] for k in range(N + 2)]
    np.testing.assert_array_equal(words.fresh[0], fresh)
    np.testing.assert_array_equal(words.draft[0], draft)


@pytest.fixture(scope="module")
def drawn():
    """A prefill and a round of laws in sixths and thirds, and their words."""
    target = np.log(np.tile(TARGET_LAW, (3, 1)))
    model = dspark.testing.scripted_model(target, np.zeros((3, 3)), gamma=N)
    requests = requests_for(*[dspark.SamplingParams(temperature=1.0)] * BATCH)
    seeds = fold_seeds(1, BATCH)
    lengths = jnp.full((BATCH,), 2, jnp.int32)
    first = round_words(seeds, lengths, N)
    begun, begin_out = quick_prefill(
        model.spec,
        model.params,
        jnp.ones((BATCH, 2), jnp.int32),
        lengths,
        jnp.full((BATCH,), 9, jnp.int32),
        requests,
        first,
        n=N,
        variant="sampled",
        capacity=16,
    )
    words = round_words(seeds, lengths + 1, N)
    state, out = quick_round(
        model.spec, model.params, begun, requests, words, N, "sampled"
    )
    results = (first, begun.proposal, begin_out, words, state.proposal, out)
    return jax.tree.map(np.asarray, results)


def tokens_of(words, law):
    """The token that each word points at."""
    return np.searchsorted(np.cumsum(law), words.astype(np.float64) / 2**32)


def test_next_proposal_reads_the_words_behind_what_was_emitted(drawn):
    """Reading those of the round's own start would draw every draft word twice."""
    *_, words, proposal, out = drawn
    assert set(out.n_emitted) == {1, 2, 3}
    of_length = words.draft[np.arange(BATCH), out.n_emitted]
    np.testing.assert_array_equal(proposal.ids, tokens_of(of_length, DRAFT_LAW))


def test_the_prefill_reads_the_words_of_its_token_and_of_what_follows_it(drawn):
    first, proposal, out, *_ = drawn
    token = tokens_of(first.fresh[:, 0], TARGET_LAW)
    np.testing.assert_array_equal(out.emitted[:, 0], token)
    ids = tokens_of(first.draft[:, 1], DRAFT_LAW)
    np.testing.assert_array_equal(proposal.ids, ids)


def test_a_fresh_row_reads_the_word_of_its_own_step(drawn):
    *_, words, _, out = drawn
    whole = out.n_emitted == N + 1
    assert whole.sum() > 5
    token = tokens_of(words.fresh[whole, N], TARGET_LAW)
    np.testing.assert_array_equal(out.emitted[whole, N], token)


def test_every_token_is_drawn_by_its_own_word():
    """With even laws a word's leading bits are its token, and all drafts stand.

    A round that starts at another length draws words of the round before again.
    """
    even = np.zeros((16, 16), np.float32)
    model = dspark.testing.scripted_model(even, even, gamma=N)
    seeds, at = jnp.asarray([[0, 7]], jnp.uint32), jnp.asarray([2], jnp.int32)
    expected = [round_words(seeds, at, N).fresh[:, :1]]
    for start in (at + 1, at + N + 2):
        words = round_words(seeds, start, N)
        expected += [words.draft[:, 0], words.fresh[:, N:]]
    expected = np.concatenate([np.asarray(x) for x in expected], 1) >> 28

    tokens = jnp.ones((1, 2), jnp.int32)
    sampling = dspark.SamplingParams(temperature=1.0)
    run = quick_jit(
        lambda params: dspark.generate_tokens(
            model.spec, params, tokens, at, seeds=seeds,
            max_new_tokens=expected.size, sampling=sampling,
        ).tokens
    )  # fmt: skip
    np.testing.assert_array_equal(run(model.params), expected)


def test_the_host_loop_hands_over_the_same_words(monkeypatch):
    def begin(spec, params, state, logits, requests, words, *rest, **options):
        return state, words

    def decode_round(spec, params, state, requests, words, *rest):
        return state, words

    monkeypatch.setattr(programs_module, "begin", begin)
    monkeypatch.setattr(programs_module, "decode_round", decode_round)
    target = dspark.testing.tiny_config()
    spec = dspark.Spec(target, dspark.testing.tiny_draft_config(target, gamma=N))
    programs = programs_module.Programs(spec, stacked=False)
    seeds, at = fold_seeds(3, 2), jnp.asarray([2, 5], jnp.int32)
    sampling = [dspark.SamplingParams()] * 2
    requests = requests_for(*sampling, seeds=np.asarray(seeds))
    state = programs.init(2, 16, N)
    # A buffer of its own, as states are donated.
    state = dataclasses.replace(state, length=state.length + at)
    state, first = programs.begin({}, state, jnp.zeros((2, 8)), requests)
    # The token of the prefill is committed, but not cached.
    _, later = programs.round({}, state, requests, "greedy", Extras())
    for words, committed in ((first, at), (later, at + 1)):
        expected = round_words(seeds, committed, N)
        jax.tree.map(np.testing.assert_array_equal, words, expected)
