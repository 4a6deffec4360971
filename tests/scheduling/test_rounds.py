"""Round logs as arrays: what is known of a round, and what is not."""

import numpy as np
import pytest

from dspark_jax.results import RoundLog
from dspark_jax.scheduling import gather_rounds


def log(accepted, emitted=None, *, drafted=3, position=10, overlap=(), stopped=False):
    return RoundLog(
        drafted=drafted,
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted,
        stopped=stopped,
        position=position,
        confidence=tuple(0.5 * (k + 1) for k in range(drafted)),
        overlap=overlap,
    )


def test_full_rounds():
    logs = [log(0), log(2, position=11), log(3, position=14)]
    rounds = gather_rounds([(logs, 100), ([log(1)], 100)], 3)
    assert len(rounds) == 4
    assert rounds.accepted.tolist() == [0, 2, 3, 1]
    assert rounds.proposed.all() and rounds.overlap is None
    assert rounds.logits.tolist() == [[0.5, 1, 1.5]] * 4
    outcomes = [[0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert rounds.outcomes.tolist() == rounds.labels.tolist() == outcomes


def test_short_proposals_and_overlaps():
    logs = [
        log(1, drafted=2, overlap=(0.75, 0.5)),
        log(3, position=12, overlap=(0.5, 0.25, 0.125)),
        log(0, drafted=0, position=16),
    ]
    rounds = gather_rounds([(logs, 100)], 3)
    assert rounds.proposed.tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0]]
    assert rounds.labels.tolist() == [[0.75, 0.5, 0], [0.5, 0.25, 0.125], [0, 0, 0]]
    assert rounds.outcomes.tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 0]]
    # One greedy request among them: outcomes for all.
    assert gather_rounds([(logs, 100), ([log(1)], 9)], 3).overlap is None
    assert len(gather_rounds([], 3)) == 0 and gather_rounds([], 3).logits.shape == (
        0,
        3,
    )


def test_nothing_is_known_behind_a_stop_token():
    rounds = gather_rounds([([log(2, 2, stopped=True)], 100)], 3)
    assert rounds.proposed.tolist() == [[1, 1, 0]]
    assert rounds.outcomes.tolist() == [[1, 1, 0]]


def test_the_token_limit_hides_positions_whatever_happened():
    # Six tokens: one of the prefill, then 2 + 1, so the last round has room for two.
    for last, kept in ((log(0, position=13), 0), (log(2, 2, position=13), 2)):
        rounds = gather_rounds([([log(1), log(0, position=12), last], 6)], 3)
        assert rounds.proposed.tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0]]
        assert rounds.accepted[2] == kept


def test_the_token_limit_bends_no_frequency(rng):
    """Requests of four tokens with drafts that stand with chance 0.8."""
    requests, chance = [], 0.8
    for _ in range(6000):
        logs, position, room = [], 10, 3
        while room:
            stood = int(np.cumprod(rng.random(3) < chance).sum())
            emitted = min(stood + 1, room)
            logs.append(log(min(stood, emitted), emitted, position=position))
            position, room = position + emitted, room - emitted
        requests.append((logs, 4))
    rounds = gather_rounds(requests, 3)

    def frequency(k, known):
        return rounds.outcomes[known[:, k], k].mean()

    for k in range(3):
        assert frequency(k, rounds.proposed) == pytest.approx(
            chance ** (k + 1), abs=0.02
        )
    # Control: leaving out only what was cut off leaves successes out.
    flat = [one for logs, _ in requests for one in logs]
    cut = [one.accepted if one.emitted == one.accepted else 3 for one in flat]
    naive = np.arange(3) < np.asarray(cut)[:, None]
    assert frequency(2, naive) < chance**3 - 0.04


def test_logs_without_confidences_are_refused():
    bare = RoundLog(3, 1, 2, False, 10, (), ())
    with pytest.raises(ValueError, match="confidence head"):
        gather_rounds([([bare], 10)], 3)
