"""What a round emitted, as Python lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dspark_jax.decoding.publishing import RoundOut


@dataclasses.dataclass(frozen=True)
class HostRound:
    """What one round emitted, per request.

    Attributes:
      present: whether the request in this place took part.
      emitted: tokens.
      kept: accepted drafts among them.
      drafted: drafts that were verified.
      finish: index into `FINISH_REASONS`; 0 while running.
      logprobs: of the emitted tokens, or empty lists.
      position: committed tokens before the round.
      confidence: logits of the drafts that were verified; empty lists unless traced,
        and without a confidence head.
      overlap: `sum_v min(p_v, q_v)` of those drafts' rows; empty lists unless traced,
        and where no rows are held.
      proposed: the drafts that wait; empty lists unless the round had masks.
    """

    present: list[bool]
    emitted: list[list[int]]
    kept: list[int]
    drafted: list[int]
    finish: list[int]
    logprobs: list[list[float]]
    position: list[int]
    confidence: list[list[float]]
    overlap: list[list[float]]
    proposed: list[list[int]]


def read_round(out: RoundOut, rows: Sequence[int | None], count: int) -> HostRound:
    """Sorts a round's results by place.

    Args:
      out: numpy arrays.
      rows: place of each request of `out`; None drops what it emitted.
      count: places; those that `rows` does not name emit nothing.

    Returns:
      The round, its positions all 0.
    """
    emitted: list[list[int]] = [[] for _ in range(count)]
    logprobs: list[list[float]] = [[] for _ in range(count)]
    confidence: list[list[float]] = [[] for _ in range(count)]
    overlap: list[list[float]] = [[] for _ in range(count)]
    proposed: list[list[int]] = [[] for _ in range(count)]
    kept, drafted, finish = [0] * count, [0] * count, [0] * count
    present = [False] * count

    def numbers(x: np.ndarray | None, at: int, first: int) -> list[float]:
        return [] if x is None else x[at, :first].tolist()

    trace = out.trace
    for at, row in enumerate(rows):
        if row is None:
            continue
        n, drafts = int(out.n_emitted[at]), int(out.n_drafts[at])
        present[row] = True
        emitted[row] = np.asarray(out.emitted[at, :n]).tolist()
        kept[row], drafted[row] = int(out.n_kept[at]), drafts
        finish[row] = int(out.finish[at])
        logprobs[row] = numbers(_host(out.logprobs), at, n)
        if out.proposed is not None:
            proposed[row] = np.asarray(out.proposed[at]).tolist()
        if trace is not None:
            confidence[row] = numbers(_host(trace.confidence), at, drafts)
            overlap[row] = numbers(_host(trace.overlap), at, drafts)
    return HostRound(
        present, emitted, kept, drafted, finish, logprobs, [0] * count, confidence,
        overlap, proposed,
    )  # fmt: skip


def _host(x) -> np.ndarray | None:
    return None if x is None else np.asarray(x)
