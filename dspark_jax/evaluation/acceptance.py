"""How many drafts stand: figures from a log of verification rounds.

In a round of n drafts a of them are accepted, and a + 1 tokens come out; where an
accepted draft was a stop token, or the line was cut there, a tokens do, and the
drafts behind count as not proposed (n = a).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dspark_jax.config import require
from dspark_jax.results import RoundLog


@dataclasses.dataclass(frozen=True, eq=False)
class Rounds:
    """A log as arrays: R rounds of at most N drafts.

    Attributes:
      proposed: int64[R]. n, drafts up to where the line was cut.
      accepted: int64[R]. a, of those.
      emitted: int64[R]. Tokens that came out.
      confidence: float64[R, N]. Logits of the draft's head, NaN behind the verified
        drafts; None if a round has none.
      overlap: float64[R, N]. `sum_v min(p_v, q_v)`, NaN behind the verified drafts;
        None if a round has none.
    """

    proposed: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray
    confidence: np.ndarray | None = None
    overlap: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def positions(self) -> int:
        """N, drafts of the longest round."""
        arrays = (self.confidence, self.overlap)
        wide = [x.shape[1] for x in arrays if x is not None]
        return max([int(self.proposed.max(initial=0)), *wide])

    def proposed_at(self) -> np.ndarray:
        """bool[R, N]: draft k was proposed, n > k."""
        return np.arange(self.positions) < self.proposed[:, None]

    def accepted_at(self) -> np.ndarray:
        """bool[R, N]: drafts 0..k were all accepted, a > k."""
        return np.arange(self.positions) < self.accepted[:, None]

    def reached(self) -> np.ndarray:
        """bool[R, N]: draft k was proposed and the ones before it accepted."""
        before = np.arange(self.positions) <= self.accepted[:, None]
        return before & self.proposed_at()


def rounds_of(logs: Iterable[RoundLog]) -> Rounds:
    """Arrays of a log."""
    logs = list(logs)
    drafted = np.asarray([one.drafted for one in logs], np.int64)
    accepted = np.asarray([one.accepted for one in logs], np.int64)
    emitted = np.asarray([one.emitted for one in logs], np.int64)
    return Rounds(
        proposed=np.where(emitted == accepted, accepted, drafted),
        accepted=accepted,
        emitted=emitted,
        confidence=_table([one.confidence for one in logs], drafted),
        overlap=_table([one.overlap for one in logs], drafted),
    )


def whole_rounds(logs: Iterable[RoundLog], limit: int) -> list[RoundLog]:
    """The rounds that no limit of tokens could cut, whatever was accepted.

    A round near the limit is seen in full only if few of its drafts stand. Leaving
    such rounds out by where they begin favours no outcome.

    Args:
      logs: of one request.
      limit: tokens that the request may commit, its prompt included.
    """
    return [one for one in logs if one.position + one.drafted + 1 <= limit]


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Figures of rounds; NaN where there is nothing to count.

    Attributes:
      rounds: R.
      accepted_length: tokens a round, the bonus token included, over all rounds
        together. The token after the prompt belongs to no round.
      verify_rate: tokens that came out, a row evaluated for a proposed draft or an
        anchor.
      proposed: by position k, rounds with n > k.
      conditional: by position, #(a > k) / #(a >= k and n > k): the chance that a draft
        stands once the ones before it do. What the paper reports by position.
      survival: by position, #(a > k) / #(n > k): the chance that a prefix stands. What
        the reference's evaluator reports by position.
      overlap: by position, the mean chance that a draft stands, over the rounds that
        reached it; it estimates `conditional` with less noise. () without overlaps.
      expected_length: mean over rounds of 1 + sum_k prod_{i <= k} overlap_i, over
        proposed drafts. Near `accepted_length` and not the same: the overlaps follow
        drafts as they were drawn, not as they were accepted. NaN without overlaps.
    """

    rounds: int
    accepted_length: float
    verify_rate: float
    proposed: tuple[int, ...]
    conditional: tuple[float, ...]
    survival: tuple[float, ...]
    overlap: tuple[float, ...]
    expected_length: float

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; None stands for NaN."""
        return {k: without_nan(x) for k, x in dataclasses.asdict(self).items()}


def acceptance(rounds: Rounds) -> Acceptance:
    """Figures of `rounds`.

    Example:
      >>> from dspark_jax import RoundLog
      >>> log = [
      ...     RoundLog(2, 2, 3, False, 5, (), ()), RoundLog(2, 0, 1, False, 8, (), ())
      ... ]
      >>> found = acceptance(rounds_of(log))
      >>> found.accepted_length, found.conditional, found.survival
      (2.0, (0.5, 1.0), (0.5, 0.5))
    """
    accepted, proposed = rounds.accepted_at(), rounds.proposed_at()
    reached = rounds.reached()
    kept = accepted.sum(0)
    rows = rounds.proposed.sum() + len(rounds)
    overlap: tuple[float, ...] = ()
    expected = float("nan")
    if rounds.overlap is not None:
        beta = np.where(proposed, rounds.overlap, 0.0)
        overlap = ratio((beta * reached).sum(0), reached.sum(0))
        lengths = 1 + np.cumprod(beta, axis=1).sum(1)
        expected = float(lengths.mean()) if len(rounds) else float("nan")
    return Acceptance(
        rounds=len(rounds),
        accepted_length=ratio(rounds.emitted.sum(), len(rounds))[0],
        verify_rate=ratio(rounds.emitted.sum(), rows)[0],
        proposed=tuple(int(x) for x in proposed.sum(0)),
        conditional=ratio(kept, reached.sum(0)),
        survival=ratio(kept, proposed.sum(0)),
        overlap=overlap,
        expected_length=expected,
    )


def ratio(part: np.ndarray | int, whole: np.ndarray | int) -> tuple[float, ...]:
    """`part / whole` one by one; NaN where `whole` is 0."""
    above, below = np.atleast_1d(part), np.atleast_1d(whole)
    return tuple(
        float(a) / float(b) if b else float("nan")
        for a, b in zip(above, below, strict=True)
    )


def without_nan(value: Any) -> Any:
    """The value with None for NaN, tuples as lists."""
    if isinstance(value, tuple | list):
        return [without_nan(one) for one in value]
    if isinstance(value, dict):
        return {name: without_nan(one) for name, one in value.items()}
    return None if isinstance(value, float) and np.isnan(value) else value


def _table(rows: Sequence[Sequence[float]], drafted: np.ndarray) -> np.ndarray | None:
    """float64[R, N] with NaN behind each row; None if some round has no numbers."""
    lengths = np.asarray([len(row) for row in rows], np.int64)
    wrong = np.flatnonzero((lengths != drafted) & (lengths > 0))
    if wrong.size:
        row = int(wrong[0])
        allowed = f"one number for each of the {drafted[row]} drafts, or none"
        require(False, f"round {row}", rows[row], allowed)
    if not lengths.any() or (lengths != drafted).any():
        return None
    table = np.full((len(rows), int(lengths.max())), np.nan)
    for into, row in zip(table, rows, strict=True):
        into[: len(row)] = row
    return table
