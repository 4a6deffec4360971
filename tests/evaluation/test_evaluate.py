"""`evaluate`: what it counts, and that a run can be repeated."""

import json
import math

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.evaluation.acceptance import acceptance, rounds_of
from dspark_jax.evaluation.evaluate import _groups
from dspark_jax.testing import tiny_config, tiny_draft_config, tiny_model
from tests.decoding.scripts import byte_model

PROMPTS = {"letters": ["ab", "hello", "qq"], "digits": ["12", "3", "456"]}


def test_groups_share_a_size():
    assert [len(g) for g in _groups(10, 8)] == [5, 5]
    assert [len(g) for g in _groups(8, 8)] == [8]
    assert [list(g) for g in _groups(3, 1)] == [[0], [1], [2]]
    assert [i for g in _groups(29, 8) for i in g] == list(range(29))


def test_arguments_are_checked_before_anything_is_decoded():
    model = byte_model("pxab")
    cases = {
        "`prompts`": dict(prompts={"a": []}),
        "`batch` is 0": dict(batch=0),
        "`seed`": dict(seed=-1),
        "`temperatures`": dict(temperatures=[]),
        "`temperature`": dict(temperatures=[0.0, -1.0]),
        "`threshold` is 2": dict(thresholds=[2]),
        "`draft_length` is 0; load": dict(draft_length=0),
        "`draft_length` is 9": dict(draft_length=9),
        "`max_new_tokens` is 0": dict(max_new_tokens=0),
    }
    for message, options in cases.items():
        with pytest.raises(ValueError, match=message):
            dspark.evaluate(model, **{"prompts": PROMPTS, **options})
    plain = dspark.make_model(
        dspark.Spec(model.spec.target), {"target": model.params["target"]},
        model.tokenizer,
    )  # fmt: skip
    with pytest.raises(ValueError, match="it has no draft"):
        dspark.evaluate(plain, PROMPTS)
    assert model.programs.count == plain.programs.count == 0


@pytest.mark.slow
def test_figures_are_those_of_the_logs():
    model = tiny_model(target=tiny_config(layers=1), draft=tiny_draft_config(
        tiny_config(layers=1), gamma=2))  # fmt: skip
    options = dict(max_new_tokens=12, chat=False, batch=4, temperatures=[0.0, 6.0])
    found = dspark.evaluate(model, PROMPTS, **options)
    assert [one.temperature for one in found.temperatures] == [0.0, 6.0]
    for one in found.temperatures:
        assert list(one.domains) == list(PROMPTS)
        logs = [log for runs in one.logs.values() for run in runs for log in run]
        hand = acceptance(rounds_of(logs)).to_json()
        assert one.overall.acceptance.to_json() == hand
        assert one.overall.prompts == 6 and one.overall.tokens == 6 * 12
        assert one.domains["digits"].prompts == len(one.logs["digits"]) == 3
        for domain, runs in one.logs.items():
            for prompt, run in zip(PROMPTS[domain], runs, strict=True):
                # Rounds that the limit could cut are left out.
                assert [log.emitted == log.accepted + 1 for log in run] == [True] * len(
                    run
                )
                assert all(log.position + 3 <= len(prompt) + 12 for log in run)
        # Predicted survival by hand, in another order of sums.
        logits = np.asarray([log.confidence for log in logs])
        chances = 1 / (1 + np.exp(-logits.astype(np.float64)))
        both = (chances[:, 0].mean(), (chances[:, 0] * chances[:, 1]).mean())
        quality = one.overall.quality
        assert quality.prediction == pytest.approx(both)
        assert quality.label == pytest.approx(one.overall.acceptance.survival)
        label = np.asarray([log.accepted > 0 for log in logs])
        assert quality.brier[0] == pytest.approx(((chances[:, 0] - label) ** 2).mean())
        bins = np.minimum((chances[:, 0] * 20).astype(int), 19)
        gaps = [
            abs((chances[bins == b, 0] - label[bins == b]).sum()) for b in range(20)
        ]
        assert quality.ece[0] == pytest.approx(sum(gaps) / len(logs))
        assert one.overall.sweep[0].accepted_length == (
            one.overall.acceptance.accepted_length
        )
    greedy, hot = (one.overall.acceptance for one in found.temperatures)
    assert greedy.overlap == () and math.isnan(greedy.expected_length)
    assert len(hot.overlap) == 2 and 1 < hot.expected_length < 3
    # Overlaps are chances: over many rounds the counts follow them.
    assert hot.conditional[0] == pytest.approx(hot.overlap[0], abs=0.2)
    json.dumps(found.to_json(), allow_nan=False)

    again = dspark.evaluate(model, PROMPTS, **options)
    assert again.to_json() == found.to_json()
    other = dspark.evaluate(model, PROMPTS, **options, seed=100)
    assert other.temperatures[0].to_json() == found.temperatures[0].to_json()
    assert other.temperatures[1].to_json() != found.temperatures[1].to_json()


@pytest.mark.slow
def test_a_perfect_draft_is_always_accepted():
    model = byte_model("pxabcdefghij")
    found = dspark.evaluate(model, {"x": ["px"]}, max_new_tokens=14, chat=False)
    for one in found.temperatures:
        figures = one.overall
        assert (
            figures.acceptance.rounds == 3 and figures.acceptance.accepted_length == 4
        )
        assert figures.acceptance.conditional == (1.0, 1.0, 1.0)
        assert figures.acceptance.verify_rate == 1.0
    # Target and draft compute the same logits, up to their last bits.
    assert figures.acceptance.overlap == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)
    assert figures.acceptance.expected_length == pytest.approx(4, abs=1e-4)
