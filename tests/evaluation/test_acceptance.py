"""Figures of rounds, counted by hand and against the reference's own."""

import json
import math

import numpy as np
import pytest

from dspark_jax.evaluation.acceptance import acceptance, rounds_of, whole_rounds
from dspark_jax.evaluation.acceptance_sweep import lengths_under, sweep
from dspark_jax.results import RoundLog
from tests.models.goldens import arrays

# Four rounds of three drafts: 3, 1 and 0 accepted; then a stop token as the second
# of at least two accepted drafts.
LOG = [
    RoundLog(3, 3, 4, False, 5, (2.0, 1.0, 0.0), (0.9, 0.8, 0.5)),
    RoundLog(3, 1, 2, False, 9, (1.0, -1.0, 3.0), (0.7, 0.4, 0.1)),
    RoundLog(3, 0, 1, False, 11, (-2.0, 2.0, 2.0), (0.2, 0.9, 0.9)),
    RoundLog(3, 2, 2, True, 12, (3.0, 2.0, -5.0), (1.0, 0.6, 0.3)),
]


def log_of(trace):
    """The rounds of a recorded generation, past the limit as well."""
    return [
        RoundLog(
            drafted=int((verified >= 0).sum()) - 1,
            accepted=int(accepted),
            emitted=int(emitted),
            stopped=bool(stopped),
            position=int(start) + 1,
            confidence=tuple(
                float(x) for x in logits[: int((verified >= 0).sum()) - 1]
            ),
            overlap=(),
        )
        for verified, accepted, emitted, stopped, start, logits in zip(
            trace["verify_input_ids"],
            trace["accepted"],
            trace["acceptance_lengths"],
            trace["terminated_by_stop"],
            trace["start"],
            trace["confidence_logits"],
            strict=True,
        )
    ]


def test_counts_by_hand():
    found = acceptance(rounds_of(LOG))
    assert found.rounds == 4 and found.accepted_length == 9 / 4
    # The third draft of the last round was cut off, not rejected.
    assert found.proposed == (4, 4, 3)
    assert found.survival == (3 / 4, 2 / 4, 1 / 3)
    assert found.conditional == (3 / 4, 2 / 3, 1 / 1)
    assert found.verify_rate == 9 / (3 + 3 + 3 + 2 + 4)
    # Means over the rounds that reached the position.
    expected = (2.8 / 4, 1.8 / 3, 0.5 / 1)
    assert found.overlap == pytest.approx(expected)
    lengths = [1 + 0.9 + 0.72 + 0.36, 1 + 0.7 + 0.28 + 0.028, 1 + 0.2 + 0.18 + 0.162]
    lengths.append(1 + 1.0 + 0.6)
    assert found.expected_length == pytest.approx(np.mean(lengths))
    assert json.loads(json.dumps(found.to_json()))["rounds"] == 4


def test_rounds_near_a_limit_are_left_out_by_where_they_begin():
    # The round from 12 may commit 16 tokens, the one from 11 at most 15.
    assert whole_rounds(LOG, 15) == LOG[:3]
    assert whole_rounds(LOG, 16) == LOG
    # A bias that leaving them out avoids: of rounds that end at the limit, only
    # those with few accepted drafts show how they would have gone on.
    rng, logs, limit = np.random.default_rng(0), [], 20
    for _ in range(4000):
        at = 10
        while at < limit:
            accepted = int(np.cumprod(rng.random(4) < 0.6).sum())
            emitted = min(accepted + 1, limit - at)
            accepted = min(accepted, emitted)
            logs.append(RoundLog(4, accepted, emitted, False, at, (), ()))
            at += emitted
    survival = acceptance(rounds_of(whole_rounds(logs, limit))).survival
    assert survival == pytest.approx([0.6**k for k in range(1, 5)], abs=0.02)
    biased = acceptance(rounds_of(logs)).survival
    assert biased[3] < 0.6**4 - 0.025


def test_no_rounds_and_uneven_rounds():
    empty = acceptance(rounds_of([]))
    assert empty.rounds == 0 and math.isnan(empty.accepted_length)
    assert empty.to_json()["accepted_length"] is None and empty.conditional == ()
    uneven = [RoundLog(1, 1, 2, False, 5, (0.5,), ()), LOG[0], RoundLog(0, 0, 1, False,
              9, (), ())]  # fmt: skip
    rounds = rounds_of(uneven)
    assert acceptance(rounds).proposed == (2, 1, 1)
    assert rounds.overlap is None and rounds.confidence is not None
    assert np.isnan(rounds.confidence[0]).tolist() == [False, True, True]
    plain = acceptance(rounds_of([RoundLog(0, 0, 1, False, 5, (), ())]))
    assert plain.accepted_length == plain.verify_rate == 1
    with pytest.raises(ValueError, match="round 0.*3 drafts"):
        rounds_of([RoundLog(3, 0, 1, False, 5, (0.5,), ())])


def test_sweep_by_hand():
    full, half, none = sweep(rounds_of(LOG), [0.0, 0.5, 1.0])
    found = acceptance(rounds_of(LOG))
    assert full.accepted_length == found.accepted_length
    assert full.verify_rate == found.verify_rate
    # sigmoid(0) is 0.5, which is not below 0.5: 3, 1, 0 and 2 drafts.
    assert half.drafts == 6 / 4 and half.verified_rows == 10 / 4
    assert half.accepted_length == (4 + 2 + 1 + 2) / 4
    assert half.verify_rate == 9 / 10
    assert none.drafts == 0 and none.accepted_length == none.verify_rate == 1
    # Just above 0.5 the first round loses its third draft, and that token is the
    # target's then; the token behind it is gone.
    above = sweep(rounds_of(LOG), [0.5 + 1e-9])[0]
    assert above.accepted_length == (3 + 2 + 1 + 2) / 4
    with pytest.raises(ValueError, match="`threshold` is 1.5"):
        sweep(rounds_of(LOG), [1.5])
    with pytest.raises(ValueError, match="no confidences"):
        sweep(rounds_of([RoundLog(1, 0, 1, False, 3, (), ())]))


@pytest.mark.parametrize("name", ["greedy_p0", "greedy_p1", "stop_in_draft_p0"])
def test_figures_of_recorded_generations(name):
    trace = arrays(f"qwen3_trained/trace_{name}")
    logs = log_of(trace)
    rounds = rounds_of(logs)
    assert rounds.proposed.tolist() == trace["effective_len"].tolist()
    # The reference runs one more round at the limit; its figures count it.
    found = acceptance(rounds)
    lengths, sizes = trace["acceptance_lengths"], trace["effective_len"]
    assert found.accepted_length == lengths.mean()
    assert found.verify_rate == lengths.sum() / (sizes.sum() + len(sizes))
    accepted = trace["accepted"]
    for k in range(7):
        n, deep = (sizes > k).sum(), (accepted > k).sum()
        reach = ((accepted >= k) & (sizes > k)).sum()
        assert found.survival[k] == deep / n
        if reach:
            assert found.conditional[k] == deep / reach
        else:
            assert math.isnan(found.conditional[k])
    if "greedy" in name:
        limit = len(trace["prompt_ids"]) + int(trace["max_new_tokens"])
        inside = whole_rounds(logs, limit)
        count = int((trace["start"] + 1 + 8 <= limit).sum())
        assert len(inside) == count < len(logs)
        assert acceptance(rounds_of(inside)).accepted_length == lengths[:count].mean()


def test_threshold_lengths_are_those_of_the_reference():
    trace = arrays("qwen3_trained/trace_threshold_p0")
    threshold = float(trace["confidence_threshold"])
    lengths = lengths_under(trace["confidence_logits"], threshold)
    assert lengths.tolist() == trace["proposal_len"].tolist()
    assert set(lengths) >= {0, 7}
    # Control: the running product would cut earlier.
    chance = 1 / (1 + np.exp(-trace["confidence_logits"].astype(np.float64)))
    product = (np.cumprod(chance, 1) >= threshold).sum(1)
    assert product.tolist() != lengths.tolist()
    # Rounds of their own lengths can be counted as well.
    found = acceptance(rounds_of(log_of(trace)))
    assert found.accepted_length == trace["acceptance_lengths"].mean()
    assert found.proposed == tuple((trace["proposal_len"] > k).sum() for k in range(7))
