"""Logs of verification rounds as arrays that a fit takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dspark_jax.config import require
from dspark_jax.scheduling.calibration import prefix_labels
from dspark_jax.scheduling.online_calibration import overlap_labels

if TYPE_CHECKING:
    # Results know the decoding loop, which may want to know this package.
    from dspark_jax.results import RoundLog


@dataclasses.dataclass(frozen=True, eq=False)
class KnownRounds:
    """S rounds of N drafted positions.

    Attributes:
      logits: float64[S, N]; 0 where nothing is known.
      accepted: int64[S]. Length of the accepted prefix.
      overlap: float64[S, N], see `RoundLog`; None for greedy rounds.
      proposed: bool[S, N]. Where the outcome is known: True, then False.
    """

    logits: np.ndarray
    accepted: np.ndarray
    overlap: np.ndarray | None
    proposed: np.ndarray

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def outcomes(self) -> np.ndarray:
        """float64[S, N]: 1 where all drafts up to the position stood."""
        return prefix_labels(self.accepted, self.logits.shape[1])

    @property
    def labels(self) -> np.ndarray:
        """What to fit to: from overlaps where they are known, else outcomes."""
        if self.overlap is None:
            return self.outcomes
        return overlap_labels(self.accepted, self.overlap)


def gather_rounds(
    requests: Iterable[tuple[Sequence[RoundLog], int]], positions: int
) -> KnownRounds:
    """Puts the rounds of several requests together.

    The outcome of a position is unknown where the round could not have published
    it: behind the token limit, whatever was accepted. (To leave out only what was cut
    off would leave out successes and keep failures.) Behind an accepted stop token it
    is unknown too.

    Args:
      requests: a request's rounds in order, and how many tokens it could emit at
        most.
      positions: N, the draft's gamma.

    Raises:
      ValueError: logs without confidences.
    """
    logits, accepted, overlap, known = [], [], [], []
    for logs, limit in requests:
        for log in logs:
            require(
                len(log.confidence) == log.drafted,
                "confidence",
                log.confidence,
                f"{log.drafted} logits: trace a draft with a confidence head",
            )
            # The first round begins behind the token of the prefill.
            room = limit - 1 - (log.position - logs[0].position)
            width = min(log.drafted, room)
            if log.emitted == log.accepted:
                width = min(width, log.accepted)
            logits.append(_padded(log.confidence, positions))
            overlap.append(_padded(log.overlap, positions))
            accepted.append(min(log.accepted, width))
            known.append((width, len(log.overlap) == log.drafted))
    width = np.asarray([w for w, _ in known], np.int64)
    soft = bool(known) and all(has for _, has in known)
    shape = (len(known), positions)
    return KnownRounds(
        logits=np.asarray(logits, np.float64).reshape(shape),
        accepted=np.asarray(accepted, np.int64),
        overlap=np.asarray(overlap, np.float64).reshape(shape) if soft else None,
        proposed=np.arange(positions) < width[:, None],
    )


def _padded(values: Sequence[float], positions: int) -> list[float]:
    return [*values, *[0.0] * (positions - len(values))]
