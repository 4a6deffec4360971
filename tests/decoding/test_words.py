"""No word is drawn twice, and each draw reads the word that is its own."""

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax as dspark
from dspark_jax.decoding.words import fold_seeds, round_words
from tests.decoding.serving import quick_prefill, quick_round, requests_for

N, BATCH = 2, 64


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


def test_next_proposal_reads_the_words_behind_what_was_emitted():
    """Reading those of the round's own start would draw every draft word twice."""
    target = np.log(np.tile([4.0, 1.0, 1.0], (3, 1)) / 6)
    model = dspark.testing.scripted_model(target, np.zeros((3, 3)), gamma=N)
    requests = requests_for(*[dspark.SamplingParams(temperature=1.0)] * BATCH)
    seeds = fold_seeds(1, BATCH)
    lengths = jnp.full((BATCH,), 2, jnp.int32)
    state, _ = quick_prefill(
        model.spec,
        model.params,
        jnp.ones((BATCH, 2), jnp.int32),
        lengths,
        jnp.full((BATCH,), 9, jnp.int32),
        requests,
        round_words(seeds, lengths, N),
        n=N,
        variant="sampled",
        capacity=16,
    )
    words = round_words(seeds, lengths + 1, N)
    state, out = quick_round(
        model.spec, model.params, state, requests, words, N, "sampled"
    )
    emitted = np.asarray(out.n_emitted)
    assert set(emitted) == {1, 2, 3}
    # The draft's law is even, so a word's third is its token.
    thirds = np.asarray(jax.device_get(words.draft)).astype(np.float64) / 2**32 * 3
    expected = thirds.astype(np.int32)[np.arange(BATCH), emitted]
    np.testing.assert_array_equal(np.asarray(state.proposal.ids), expected)
