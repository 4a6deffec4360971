"""Drafts that are right are accepted whole, and up to the first wrong one otherwise."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from tests.decoding.serving import no_words, quick_prefill, quick_round, requests_for
from tests.deepseek_v4.test_end_to_end import CAPACITY, PROMPT, model_of, recorded

CASE = "d"


def run(batch, n, right):
    """Tokens emitted by each request when round r offers `right(request, r)` drafts."""
    gold, model = recorded(CASE), model_of(CASE)
    text, prompt = gold["tokens"].tolist(), gold["prompt"].tolist()
    tokens = np.zeros((batch, PROMPT), np.int32)
    tokens[:, : len(prompt)] = prompt
    lengths = jnp.full((batch,), len(prompt), jnp.int32)
    requests = requests_for(*[dspark.SamplingParams()] * batch)
    words, budget = no_words(batch, n), jnp.full((batch,), len(text), jnp.int32)
    state, out = quick_prefill(
        model.spec, model.params, jnp.asarray(tokens), lengths, budget, requests, words,
        n=n, variant="greedy", capacity=CAPACITY,
    )  # fmt: skip
    found = [[int(out.emitted[row, 0])] for row in range(batch)]
    kept = [[] for _ in range(batch)]
    for number in range(len(text)):
        if all(len(row) == len(text) for row in found):
            return found, kept
        ids = np.zeros((batch, n), np.int32)
        for row in range(batch):
            following = (text[len(found[row]) :] + [0] * n)[:n]
            count = right(row, number)
            wrong = [(token + 1) % 128 for token in following]
            ids[row] = following[:count] + wrong[count:]
        proposal = dataclasses.replace(state.proposal, ids=jnp.asarray(ids))
        state = dataclasses.replace(state, proposal=proposal)
        state, out = quick_round(
            model.spec, model.params, state, requests, words, n, "greedy"
        )
        for row in range(batch):
            if out.n_emitted[row]:
                found[row] += np.asarray(out.emitted)[
                    row, : out.n_emitted[row]
                ].tolist()
                kept[row].append(int(out.n_kept[row]))
    raise AssertionError("more rounds than tokens")


def check(batch, n, right):
    text = recorded(CASE)["tokens"].tolist()
    found, kept = run(batch, n, right)
    for row in range(batch):
        assert found[row] == text
        # The last round is cut where the request ends.
        wanted = [right(row, number) for number in range(len(kept[row]))]
        assert kept[row][:-1] == wanted[:-1]
        assert kept[row][-1] <= wanted[-1]


@pytest.mark.slow
def test_every_accepted_length_beside_each_other():
    """Four requests, whose accepted lengths differ in every round."""
    check(4, 5, lambda row, number: (row + number) % 6)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_perfect_drafts_are_accepted_whole(batch, n):
    check(batch, n, lambda row, number: n)
