"""Row by row or all rows at once: the same text; unreached rows are not evaluated."""

import dataclasses

import jax
import numpy as np
import pytest

import dspark_jax as dspark
from tests.decoding.serving import greedy_rounds, requests_for

PROMPTS = ["one", "and another", "three"]


def pair(seed=0):
    """A model, and the same one that verifies row by row."""
    model = dspark.testing.tiny_model(seed=seed, scale=1.0)
    spec = dataclasses.replace(model.spec, one_by_one=True)
    return model, dspark.make_model(spec, model.params, model.tokenizer)


def results(model, **options):
    sampling = [
        dspark.SamplingParams(stop_ids=(17, 40), **options.get("warm", {}), seed=i)
        for i in range(len(PROMPTS))
    ]
    return dspark.generate(
        model, PROMPTS, sampling=sampling, max_new_tokens=23, capacity=64,
        draft_length=options.get("draft_length"),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("warm", [{}, {"temperature": 0.9}], ids=["greedy", "drawn"])
def test_text_is_that_of_whole_rounds(warm):
    at_once, one_by_one = pair()
    wanted, found = results(at_once, warm=warm), results(one_by_one, warm=warm)
    assert [r.tokens for r in found] == [r.tokens for r in wanted]
    assert [r.finish_reason for r in found] == [r.finish_reason for r in wanted]
    for one, whole in zip(found, wanted, strict=True):
        # Every row that is evaluated emits a token; the first one needs no round.
        assert one.stats.verified_rows == len(one.tokens) - 1
        assert whole.stats.verified_rows > len(whole.tokens) - 1


def test_a_budget_ends_rows_too():
    """Of a request that may emit two more tokens, two rows are evaluated."""
    tokens = jax.numpy.asarray([[5, 6, 7, 8]] * 2, jax.numpy.int32)
    at_once, rows = (
        greedy_rounds(
            model, tokens, jax.numpy.asarray([4, 4]), np.asarray([3, 9]),
            requests_for(*[dspark.SamplingParams()] * 2), model.spec.gamma, 32,
        )
        for model in pair()
    )  # fmt: skip
    assert [len(row.tokens) for row in rows] == [3, 9]
    assert rows[1].tokens[:3] == rows[0].tokens
    for one, whole in zip(rows, at_once, strict=True):
        assert (one.tokens, one.kept) == (whole.tokens, whole.kept)


def test_no_policy_beside_it():
    model = pair()[1]
    with pytest.raises(ValueError, match="the model verifies `one_by_one`"):
        dspark.generate(
            model, "x", max_new_tokens=4, policy=dspark.Threshold(survival=0.5)
        )
