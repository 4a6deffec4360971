"""Speculative decoding through the serving code, against the published loop."""

import dataclasses
import functools

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.models.params import flatten, unflatten
from tests.decoding.serving import greedy_rounds, requests_for
from tests.deepseek_v4.goldens import Runner, arrays, difference, draft, target
from tests.models.goldens import right_padded
from tests.models.quick import quick_jit

CASES = "abcd"
CAPACITY, PROMPT = 96, 48


def recorded(case):
    found = arrays("dspark_e2e")
    return {k[2:]: v for k, v in found.items() if k.startswith(f"{case}.")}


@functools.cache
def model_of(case):
    """Model a with tables scaled as the recording did, which raises acceptance."""
    gold = recorded(case)
    config, params = target()
    draft_config, draft_params = draft()
    flat, stage = flatten(params), flatten(draft_params)
    flat["embed", "weight"] = flat["embed", "weight"] * gold["embed_scale"]
    table = ("markov", "w2", "weight")
    stage[table] = stage[table] * gold["markov_w2_scale"]
    return dspark.make_model(
        dspark.Spec(config, draft_config),
        {"target": unflatten(flat), "draft": unflatten(stage)},
    )


@functools.cache
def rounds(case):
    """The recorded prompt, and beside it two shorter ones."""
    gold, model = recorded(case), model_of(case)
    prompts = prompts_of(case)
    tokens, lengths = right_padded(prompts)
    tokens = np.pad(tokens, [(0, 0), (0, PROMPT - tokens.shape[1])])
    requests = requests_for(*[dspark.SamplingParams()] * len(prompts))
    budgets = np.asarray([len(gold["tokens"]), 12, 9])
    return greedy_rounds(model, tokens, lengths, budgets, requests, 5, CAPACITY)


def prompts_of(case):
    prompt = recorded(case)["prompt"].tolist()
    return [prompt, prompt[:5], prompt[3:]]


@pytest.mark.parametrize("case", CASES)
def test_tokens_drafts_and_accepted_lengths(case):
    gold, row = recorded(case), rounds(case)[0]
    assert row.tokens == gold["tokens"].tolist()
    count = len(row.start)
    assert row.drafts == gold["drafts"][:count].tolist()
    # The last round may keep fewer than it accepted: the request ends.
    assert row.kept[:-1] == gold["accepted"][: count - 1].tolist()
    assert difference(np.stack(row.confidence), gold["confidence"][:count]) <= 1e-4


def test_all_accepted_lengths_occur():
    seen = {kept for case in CASES for kept in rounds(case)[0].kept}
    assert seen == set(range(6))


def test_neighbours_of_other_lengths_decode_as_if_alone():
    model = model_of("d")
    for row, prompt in list(zip(rounds("d"), prompts_of("d"), strict=True))[1:]:
        assert row.kept and max(row.kept) > 0
        alone = Runner(config=model.spec.target, params=model.params["target"])
        logits, _ = alone.feed(prompt, 16)
        for token in row.tokens:
            assert token == logits[-1].argmax()
            logits, _ = alone.feed([token], 6)


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 0])
def test_one_program(n):
    """The loop over rounds compiled as a whole, with drafts and without."""
    model = model_of("d")
    tokens, lengths = right_padded(prompts_of("d"))
    requests = requests_for(*[dspark.SamplingParams()] * 3)
    decode = quick_jit(
        functools.partial(
            dspark.generate_tokens, model.spec, requests=requests, variant="greedy",
            draft_length=n, max_new_tokens=24, capacity=CAPACITY,
        )
    )  # fmt: skip
    out = decode(model.params, tokens, lengths)
    for row, wanted in enumerate(rounds("d")):
        found = out.tokens[row].tolist()
        count = min(24, len(wanted.tokens))
        assert found[:count] == wanted.tokens[:count]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["d"])
def test_row_by_row(case):
    """Verification that ends at the first draft that falls gives the same rounds."""
    gold, model = recorded(case), model_of(case)
    spec = dataclasses.replace(model.spec, one_by_one=True)
    tokens, lengths = right_padded(prompts_of(case))
    tokens = np.pad(tokens, [(0, 0), (0, PROMPT - tokens.shape[1])])
    found = greedy_rounds(
        dspark.make_model(spec, model.params), tokens, lengths,
        np.asarray([len(gold["tokens"]), 12, 9]),
        requests_for(*[dspark.SamplingParams()] * 3), 5, CAPACITY,
    )  # fmt: skip
    for mine, whole in zip(found, rounds(case), strict=True):
        assert (mine.tokens, mine.drafts, mine.kept) == (
            whole.tokens, whole.drafts, whole.kept
        )  # fmt: skip
