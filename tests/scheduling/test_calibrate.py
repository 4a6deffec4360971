"""`calibrate`: which rounds are fitted, which are measured, and refusals."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.calibrate import split
from dspark_jax.checkpoint import native
from dspark_jax.evaluation import held_out
from dspark_jax.results import RoundLog
from dspark_jax.scheduling import (
    calibrated,
    default_grid,
    gather_rounds,
    metrics,
    survival,
)
from dspark_jax.scheduling.choice import Choice
from dspark_jax.testing import tiny_config, tiny_draft_config, tiny_model

PROMPTS = ["one", "two", "three", "four", "five", "six"]
TRUTH = default_grid()[[27, 29]]
SHIFTS = (-0.8, -0.6)


class Calls(list):
    """Prompts and settings of decoding, and the shifts that make the head right."""

    shifts = (0.0, 0.0)


def a_model(**changes):
    """A model as far as `calibrate` looks at it."""
    draft = tiny_draft_config(tiny_config("llama"), gamma=2)
    spec = SimpleNamespace(draft=dataclasses.replace(draft, **changes))
    return SimpleNamespace(spec=spec, name="made up")


@pytest.fixture
def calls(monkeypatch):
    """Replaces decoding by rounds whose true temperatures and shifts are known."""
    seen = Calls()

    def generate(model, texts, *, sampling, max_new_tokens, trace, **options):
        # Whole blocks: a shorter round looks like a rejection.
        assert trace and options.pop("draft_length") == 2 and "policy" not in options
        seen.extend(zip(texts, sampling, strict=True))
        results = []
        for one in sampling:
            rng = np.random.default_rng(one.seed)
            logits = 2 * rng.standard_normal((500, 2)) + 1
            overlap = calibrated(logits, TRUTH, seen.shifts)
            accepted = np.cumprod(rng.random(overlap.shape) < overlap, 1).sum(1)
            position = 10 + np.cumsum([0, *(accepted[:-1] + 1)])
            soft = [()] * 500 if one.greedy else overlap.tolist()
            logs = [
                RoundLog(2, int(a), int(a) + 1, False, int(p), tuple(z), tuple(o))
                for a, p, z, o in zip(accepted, position, logits, soft, strict=True)
            ]
            results.append(
                SimpleNamespace(rounds=logs, finish_reason="stop", tokens=[])
            )
        return results

    monkeypatch.setattr(sys.modules["dspark_jax.calibrate"], "generate", generate)
    return seen


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_truth_is_found_on_other_prompts(calls, temperature, tmp_path):
    prompts, done = [f"prompt {i}" for i in range(64)], []
    found = dspark.calibrate(
        a_model(),
        prompts,
        temperature=temperature,
        max_new_tokens=10**6,
        shift=False,
        seed=5,
        batch=10,
        progress=lambda *at: done.append(at),
    )
    fitted, others = split(prompts, 0.25)
    assert [text for text, _ in calls] == fitted + others
    assert [one.seed for _, one in calls] == list(range(5, 69))
    assert {one.temperature for _, one in calls} == {temperature}
    assert done[-1] == (64, 64) and len(done) == 7
    assert found.counts == {
        "fit_prompts": 48,
        "fit_rounds": 24000,
        "evaluation_prompts": 16,
        "evaluation_rounds": 8000,
    }
    steps = np.abs(np.log10(found.temperatures / TRUTH)) * 20
    assert steps.max() <= 1.01
    assert (found.before.ece > 3 * found.after.ece).all()
    assert (found.after.ece < 2 * found.after.noise + 0.01).all()
    assert found.notes == () and found.shifts is None and found.choice is None
    shown = json.loads(json.dumps(found.to_json()))
    assert shown["calibrated_at"] == temperature
    assert shown["after"]["ece"] == found.after.ece.tolist()


def test_shifts_are_found_where_they_are_needed(calls):
    calls.shifts = SHIFTS
    prompts = [f"prompt {i}" for i in range(32)]
    few = default_grid()[[20, 24, 27, 29, 33]]
    options = dict(max_new_tokens=10**6, temperature=0.7, grid=few)
    found = dspark.calibrate(a_model(), prompts, **options)
    without = dspark.calibrate(a_model(), prompts, shift=False, **options)
    assert found.shifts is not None and found.choice is not None
    assert found.choice.kind == "shifts" and found.notes == ()
    assert found.choice.errors["shifts"] < found.choice.errors["temperatures"] / 2
    assert np.abs(np.subtract(found.shifts, SHIFTS)).max() < 0.25
    # Fitted on all prompts of the fit, not on the half that was to be judged.
    assert found.counts == without.counts
    whole, _ = split(prompts, 0.25)
    half, judges = split(whole, 0.5)
    assert len(half) == len(judges) == 12 and not set(half) & set(judges)
    # Measured on the others, with the shifts.
    assert (found.after.ece < 2 * found.after.noise + 0.005).all()
    assert found.after.ece[0] < without.after.ece[0] / 2
    np.testing.assert_array_equal(found.before.ece, without.before.ece)
    shown = json.loads(json.dumps(found.to_json()))
    assert shown["shifts"] == list(found.shifts)
    assert shown["choice"] == dataclasses.asdict(found.choice)


def test_too_few_prompts_to_choose(calls):
    found = dspark.calibrate(a_model(), ["a", "b"], max_new_tokens=10**6)
    plain = dspark.calibrate(a_model(), ["a", "b"], max_new_tokens=10**6, shift=False)
    assert found.choice is None and found.shifts is None
    assert "too few prompts" in found.notes[0]
    assert found.temperatures == plain.temperatures
    assert found.notes[1:] == plain.notes


def test_where_no_fit_helps_confidences_stay(calls, monkeypatch):
    chosen = Choice("identity", {"identity": 0.01, "temperatures": 0.02})
    module = sys.modules["dspark_jax.calibrate"]
    monkeypatch.setattr(module, "choose", lambda *halves: chosen)
    found = dspark.calibrate(a_model(), PROMPTS, max_new_tokens=10**6)
    assert found.choice == chosen
    assert found.temperatures == (1, 1) and found.shifts is None
    assert "stay as they are" in found.notes[0]
    assert found.after.to_json() == found.before.to_json()


def test_what_was_cut_off_is_not_measured(calls):
    # 300 rounds of up to three tokens do not fit into so few.
    found = dspark.calibrate(a_model(), PROMPTS, max_new_tokens=300)
    assert (found.rounds.proposed.sum(0) < 500).all()
    assert any("rounds were measured" in note for note in found.notes)


def test_notes_say_where_one_temperature_cannot_help(calls):
    found = dspark.calibrate(
        a_model(),
        PROMPTS,
        max_new_tokens=10**6,
        grid=[1.0, 1.1],
        shift=False,
    )
    assert "position 1, 2 is at an end of the grid" in found.notes[0]


def test_split_is_by_text():
    texts = [f"prompt {i}" for i in range(40)]
    fitted, others = split(texts, 0.25)
    assert len(others) == 10 and sorted(fitted + others) == sorted(texts)
    # Neither order nor repetition moves a text to the other half.
    again = split([*texts[::-1], *texts, " prompt 7 "], 0.25)
    assert [set(half) for half in again] == [set(fitted), set(others)]
    assert [len(half) for half in split(["a", "b"], 0.01)] == [1, 1]
    assert [len(half) for half in split(["a", "b"], 0.99)] == [1, 1]
    assert split([" a ", "b"], 0.5) in ((["a"], ["b"]), (["b"], ["a"]))


def test_conversations_are_split_too():
    talks = [[{"role": "user", "content": f"prompt {i}"}] for i in range(20)]
    mixed = [*talks, *(f"prompt {i}" for i in range(20))]
    fitted, others = split(mixed, 0.25)
    assert len(others) == 10 and all(one in fitted + others for one in mixed)
    # The order of a turn's fields does not matter.
    same = [[dict(reversed(turn.items())) for turn in talk] for talk in talks]
    again = split([*same, *mixed[::-1]], 0.25)
    for half, found in zip((fitted, others), again, strict=True):
        assert len(half) == len(found) and all(one in half for one in found)


def test_refusals(calls):
    model, reserved = a_model(), held_out(1)["prose"][0]
    with pytest.raises(ValueError, match="held-out set"):
        dspark.calibrate(model, [*PROMPTS, reserved])
    turns = [{"role": "user", "content": f" {reserved}\n"}]
    with pytest.raises(ValueError, match="has 1 of the held-out set"):
        dspark.calibrate(model, [*PROMPTS, turns])
    with pytest.raises(ValueError, match="one conversation"):
        dspark.calibrate(model, turns)
    with pytest.raises(ValueError, match="two different texts"):
        dspark.calibrate(model, ["a", "a "])
    with pytest.raises(ValueError, match="one text"):
        dspark.calibrate(model, "ab")
    with pytest.raises(ValueError, match="`holdout`"):
        dspark.calibrate(model, PROMPTS, holdout=1.0)
    with pytest.raises(ValueError, match="`temperature`"):
        dspark.calibrate(model, PROMPTS, temperature=-1.0)
    with pytest.raises(ValueError, match="`batch`"):
        dspark.calibrate(model, PROMPTS, batch=0)
    silent = a_model(confidence=False, confidence_with_markov=False)
    with pytest.raises(ValueError, match="without a confidence head"):
        dspark.calibrate(silent, PROMPTS)
    plain = SimpleNamespace(spec=SimpleNamespace(draft=None), name="plain")
    with pytest.raises(ValueError, match="no draft"):
        dspark.calibrate(plain, PROMPTS)
    with pytest.raises(ValueError, match="`max_new_tokens` 1"):
        dspark.calibrate(model, PROMPTS, max_new_tokens=1)
    assert all(one.temperature == 0 for _, one in calls)


@pytest.mark.slow
def test_rounds_of_a_real_model(tmp_path):
    model = tiny_model(stacked=True)
    found = dspark.calibrate(
        model, PROMPTS, temperature=1.0, holdout=0.3, seed=3,
        max_new_tokens=8, chat=False, batch=2,
    )  # fmt: skip
    fitted, others = split(PROMPTS, 0.3)
    # The same decoding by hand: prompt i is sampled with seed + i.
    results = dspark.generate(
        model,
        others,
        max_new_tokens=8,
        chat=False,
        trace=True,
        sampling=[
            dspark.SamplingParams(temperature=1.0, seed=3 + len(fitted) + i)
            for i in range(len(others))
        ],
    )
    rounds = gather_rounds([(r.rounds, 8) for r in results], model.spec.gamma)
    assert rounds.overlap is not None
    assert np.array_equal(rounds.logits, found.rounds.logits)
    assert np.array_equal(rounds.outcomes, found.rounds.outcomes)
    expected = metrics(
        survival(rounds.logits, found.temperatures, found.shifts),
        rounds.outcomes,
        proposed=rounds.proposed,
    )
    np.testing.assert_array_equal(found.after.ece, expected.ece)

    draft = model.spec.draft
    assert draft is not None
    native.write_native(tmp_path / "draft", draft, model.params["draft"])
    found.save(tmp_path / "draft")
    stored = native.read_native_config(tmp_path / "draft")
    assert stored.confidence_temperatures == found.temperatures
    assert stored.confidence_shifts == found.shifts
    assert stored.calibrated_at == 1.0
