"""Recorded rounds under other policies, against figures made by hand."""

import dataclasses
import json
from typing import cast

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.results import ChatState, RoundLog
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel
from dspark_jax.scheduling.policy import Budget, EarlyStop, Gate, Threshold
from dspark_jax.scheduling.replay import (
    Recording,
    joined,
    load_recording,
    record,
    replay,
    save_recording,
)
from dspark_jax.settings import Fixed

# One request, three drafts: 2 rows cost 10, each further one 2, and a proposal 3.
COSTS = CostModel(curve([2, 3, 4], [10.0, 12.0, 14.0]), draft_ms=3.0)
SURE, LOST = 4.0, -4.0


def recording_of(accepted, logits, costs=COSTS):
    """Rounds of one request."""
    rounds = len(accepted)
    return Recording(
        np.arange(1, rounds + 1, dtype=np.int32)[:, None],
        np.asarray(logits, np.float32)[:, None],
        np.asarray(accepted, np.int32)[:, None],
        np.ones((rounds, 1), bool),
        costs.table(1),
    )


# The head knows: three drafts stand, or none.
KNOWN = recording_of([3, 0, 3, 0], [[SURE] * 3, [LOST] * 3] * 2)


@pytest.mark.parametrize(
    ("n", "tokens", "ms"), [(0, 4, 40), (1, 6, 52), (2, 8, 60), (3, 10, 68)]
)
def test_fixed_lengths_by_hand(n, tokens, ms):
    score = replay(KNOWN, Fixed(n))
    assert (score.tokens, score.milliseconds) == (tokens, ms)
    assert score.verified == n and score.accepted_length == tokens / 4
    assert score.drafting == (n > 0)
    assert score.tokens_per_second == 1000 * tokens / ms


def test_a_threshold_verifies_what_stands():
    score = replay(KNOWN, Threshold(survival=0.5))
    # 17 for the rounds that stand, 13 for those that fall.
    assert (score.tokens, score.milliseconds, score.verified) == (10, 60, 1.5)
    flat = replay(KNOWN, Threshold(survival=0.5), temperatures=[100.0] * 3)
    # 0.51 for the first draft where it is sure, 0.49 where it is not.
    assert flat.verified == 0.5 and flat.tokens == 6


@pytest.mark.parametrize("stored", [True, False])
def test_confidences_count_as_they_were_calibrated(stored, tmp_path):
    """The head says 0.98 or 0.02; shifted by -4, it says a half or nearly nothing."""
    fit = dict(temperatures=(1.0, 1.0, 1.0), shifts=(-4.0, -4.0, -4.0))
    if stored:
        path = tmp_path / "rounds.jsonl"
        save_recording(path, dataclasses.replace(KNOWN, **fit))
        recording, given = load_recording(path), {}
        assert dict(temperatures=recording.temperatures, shifts=recording.shifts) == fit
    else:
        recording, given = KNOWN, fit
    # One draft of a half survives in each sure round; two would be a quarter.
    one = replay(recording, Threshold(survival=0.5), **given)
    assert (one.verified, one.tokens) == (0.5, 6)
    assert replay(recording, Threshold(survival=0.25), **given).verified == 1
    # A shorter block has the first numbers.
    assert replay(recording, Threshold(1, survival=0.5), **given).verified == 0.5
    # Control: the head's own word, here and where it is asked for.
    for plain in (KNOWN, recording):
        own = replay(plain, Threshold(survival=0.5), temperatures=[1.0] * 3)
        assert own.verified == 1.5
    # The gate learns from logits and not from chances, as it does where it serves.
    assert replay(recording, Gate(), **given) == replay(KNOWN, Gate())
    with pytest.raises(ValueError, match="temperatures"):
        replay(recording, Threshold(), temperatures=[1.0])


def test_early_stop_and_budget_weigh_the_time():
    # The first draft is free: a row alone runs as two.
    early = replay(KNOWN, EarlyStop())
    assert (early.verified, early.milliseconds) == (2, 60)
    # The total comes from the proposal before: 3 drafts at first and after a sure
    # round, the free one after a lost round.
    late = replay(KNOWN, Budget())
    assert (late.verified, late.tokens) == (10 / 4, 4 + 1 + 2 + 1)
    same = recording_of([3] * 4, [[SURE] * 3] * 4)
    assert replay(same, Budget()).tokens == 16


def test_a_gate_learns_that_nothing_stands():
    lost = recording_of([0] * 60, [[LOST] * 3] * 60)
    gate = replay(lost, Gate())
    assert gate.drafting < 0.5
    assert gate.tokens_per_second > replay(lost, Fixed(3)).tokens_per_second


def test_fewer_drafts_than_were_recorded():
    assert replay(KNOWN, Threshold(2, survival=0.0)).verified == 2
    with pytest.raises(ValueError, match="draft_length"):
        replay(KNOWN, Fixed(4))


def test_requests_that_ended_cost_nothing():
    two = CostModel(curve([2, 4, 6, 8], [10.0, 14.0, 18.0, 22.0]))
    both = Recording(
        np.ones((2, 2), np.int32),
        np.full((2, 2, 3), SURE, np.float32),
        np.asarray([[3, 1], [2, 0]], np.int32),
        np.asarray([[True, True], [True, False]]),
        two.table(2),
    )
    score = replay(both, Fixed(3))
    assert score.tokens == 4 + 2 + 3 and score.milliseconds == 22 + 14
    assert score.verified == 3 and score.accepted_length == 3


def test_files(tmp_path):
    path = tmp_path / "rounds.jsonl"
    save_recording(path, joined([KNOWN, KNOWN]))
    back = load_recording(path)
    assert len(back.live) == 8
    for policy in (Fixed(2), Budget(), Gate()):
        assert replay(back, policy) == replay(joined([KNOWN, KNOWN]), policy)
    lines = path.read_text().splitlines()
    broken = [
        "",
        "{}",
        lines[0].replace('"format": 2', '"format": 3'),
        lines[0].replace('"shifts": null', '"shifts": [0.0]'),
        lines[0].replace('"temperatures": null', '"temperatures": [1.0, 1.0, 0.0]'),
        "\n".join([lines[0], "[]"]),
        "\n".join([lines[0], lines[1], json.dumps({"round": 1})]),
        "\n".join([lines[0], lines[1].replace("[4.0, 4.0, 4.0]", "[4.0, 4.0]")]),
    ]
    for text in broken:
        path.write_text(text)
        with pytest.raises(ValueError, match="no log of rounds"):
            load_recording(path)
    with pytest.raises(ValueError, match="cannot read"):
        load_recording(tmp_path / "none.jsonl")


# Not looked at.
STATE = cast(ChatState, None)


def result_of(logs):
    stats = dspark.Stats(0, 0, 0, 0, 0.0, (), 0.0, 0.0, 0, "reference")
    return dspark.Result("", [], "length", None, stats, STATE, tuple(logs))


def log_of(drafted, accepted, position, confidence):
    return RoundLog(drafted, accepted, accepted + 1, False, position, confidence, ())


def test_logs_become_a_recording():
    first = [log_of(2, 2, 5, (1.0, 2.0)), log_of(2, 0, 8, (3.0, 4.0))]
    recording = record([result_of(first), result_of(first[:1])], COSTS)
    assert recording.accepted.tolist() == [[2, 2], [0, 0]]
    assert recording.live.tolist() == [[True, True], [True, False]]
    assert recording.generation.tolist() == [[5, 5], [8, 0]]
    assert recording.confidence[1, 0].tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("calibrated_at", "temperature", "used"),
    [(0.0, 0.0, True), (0.0, 0.7, False), (1.0, 0.0, False), (1.0, 0.7, True)],
)
def test_a_calibration_is_recorded_where_serving_uses_it(
    calibrated_at, temperature, used
):
    target = dspark.testing.tiny_config()
    draft = dataclasses.replace(
        dspark.testing.tiny_draft_config(target, gamma=3),
        confidence_temperatures=(2.0, 3.0, 4.0),
        confidence_shifts=(0.5, 0.0, -0.5),
        calibrated_at=calibrated_at,
    )
    logs = [result_of([log_of(2, 2, 5, (1.0, 2.0))])]
    found = record(logs, COSTS, draft, temperature)
    wanted = ((2.0, 3.0), (0.5, 0.0)) if used else (None, None)
    assert (found.temperatures, found.shifts) == wanted
    # One that was never fitted, and temperatures alone.
    bare = dataclasses.replace(
        draft, confidence_temperatures=None, confidence_shifts=None, calibrated_at=None
    )
    assert record(logs, COSTS, bare, temperature).temperatures is None
    warm = dataclasses.replace(draft, confidence_shifts=None)
    found = record(logs, COSTS, warm, temperature)
    assert (found.temperatures, found.shifts) == (wanted[0], None)


def test_logs_that_are_no_recording():
    with pytest.raises(ValueError, match="trace=True"):
        record([dataclasses.replace(result_of([]), rounds=None)], COSTS)
    mixed = [log_of(2, 1, 5, (1.0, 2.0)), log_of(1, 1, 7, (1.0,))]
    silent = [log_of(2, 1, 5, ())]
    for logs in ([], mixed, silent):
        with pytest.raises(ValueError, match="rounds"):
            record([result_of(logs)], COSTS)
