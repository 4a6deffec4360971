"""What a threshold on the confidence would have proposed.

A proposal is cut before its first draft whose confidence, given that the drafts
before it stand, is below the threshold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.config import require
from dspark_jax.evaluation.acceptance import Rounds, ratio, without_nan
from dspark_jax.scheduling import calibrated

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """Rounds under one threshold.

    Attributes:
      threshold: 0 cuts nothing.
      drafts: proposed a round.
      accepted_length: tokens a round.
      verified_rows: rows evaluated a round, drafts + 1.
      verify_rate: accepted_length / verified_rows.
    """

    threshold: float
    drafts: float
    accepted_length: float
    verified_rows: float
    verify_rate: float

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; None stands for NaN."""
        return without_nan(dataclasses.asdict(self))


def lengths_under(confidence: np.ndarray, threshold: float) -> np.ndarray:
    """int64[R]: drafts before the first with sigmoid(logit) < threshold, strictly.

    Args:
      confidence: float[R, N]. Logits, NaN behind a round's drafts.
      threshold: in [0, 1].
    """
    require(0 <= threshold <= 1, "threshold", threshold, "[0, 1]")
    chance = calibrated(confidence)
    cut = np.isnan(chance) | (chance < threshold)
    return np.where(cut.any(1), cut.argmax(1), cut.shape[1]).astype(np.int64)


def sweep(
    rounds: Rounds, thresholds: Sequence[float] = THRESHOLDS
) -> tuple[SweepPoint, ...]:
    """Scores a log again, as if proposals had been cut by each threshold.

    The rounds stay those of full verification. Decoding with a threshold commits
    other lengths, so its rounds begin elsewhere and its own log gives slightly
    other figures.

    Args:
      rounds: of a fixed draft length.
      thresholds: each in [0, 1].

    Raises:
      ValueError: a threshold out of range, or rounds without confidences.

    Example:
      >>> from dspark_jax import RoundLog
      >>> from dspark_jax.evaluation.acceptance import rounds_of
      >>> log = [RoundLog(2, 2, 3, False, 5, (0.0, -2.0), ())]
      >>> [(p.drafts, p.accepted_length) for p in sweep(rounds_of(log), [0.0, 0.3])]
      [(2.0, 3.0), (1.0, 2.0)]
    """
    if rounds.confidence is None:
        raise ValueError("the rounds have no confidences; the draft needs a head")
    points = []
    for threshold in thresholds:
        length = np.minimum(
            lengths_under(rounds.confidence, threshold), rounds.proposed
        )
        # A shorter proposal's last token is the target's own; a round that was cut
        # without one is cut there still.
        emitted = np.minimum(rounds.emitted, length + 1)
        count, drafts, tokens = len(rounds), length.sum(), emitted.sum()
        points.append(
            SweepPoint(
                threshold=float(threshold),
                drafts=ratio(drafts, count)[0],
                accepted_length=ratio(tokens, count)[0],
                verified_rows=ratio(drafts + count, count)[0],
                verify_rate=ratio(tokens, drafts + count)[0],
            )
        )
    return tuple(points)
