"""Recorded rounds, scored again under other policies.

A log is a file of JSON lines: first what rounds cost, then a line a round. Rounds of
whole blocks tell what a policy that verified less would have got of each block; they do
not tell how the text would have been cut into rounds, so a replay takes the recorded
blocks one after the other, as if what was not verified were decoded again by another
block of the same kind. That is good for comparing policies and no prediction of a run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import require
from dspark_jax.config_draft import DraftConfig
from dspark_jax.files import replace_text
from dspark_jax.results import Result, RoundLog
from dspark_jax.scheduling import decide
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import Costs, CostTable, table_of
from dspark_jax.scheduling.memory import Memory, Offer
from dspark_jax.scheduling.policy import Policy, Scheduled
from dspark_jax.scheduling.survival import Shifts, Temperatures, survival
from dspark_jax.settings import GREEDY_BELOW

FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Recording:
    """R rounds of B requests that drafted n tokens and verified all of them.

    Attributes:
      generation: int32[R, B]. Committed length that each proposal was made at.
      confidence: float32[R, B, n]. Logits.
      accepted: int32[R, B]. Drafts that stood.
      live: bool[R, B]. False where a request had ended.
      costs: of rounds of up to B requests.
      temperatures: n numbers, as the confidences were calibrated when they served;
        None: as the head gave them.
      shifts: n numbers, likewise; None: 0.
    """

    generation: np.ndarray
    confidence: np.ndarray
    accepted: np.ndarray
    live: np.ndarray
    costs: CostTable
    temperatures: tuple[float, ...] | None = None
    shifts: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Score:
    """What a policy made of a recording.

    Attributes:
      rounds: rounds with a running request.
      tokens: emitted in them.
      milliseconds: by the costs.
      verified: drafts verified a round and request.
      accepted_length: tokens a round and request.
      drafting: share of the rounds that drafted.
    """

    rounds: int
    tokens: int
    milliseconds: float
    verified: float
    accepted_length: float
    drafting: float

    @property
    def tokens_per_second(self) -> float:
        """All requests together."""
        return 1000 * self.tokens / self.milliseconds

    def to_json(self) -> dict[str, float]:
        """Plain numbers."""
        speed = {"tokens_per_second": self.tokens_per_second}
        return {**dataclasses.asdict(self), **speed}


def record(
    results: Sequence[Result],
    costs: Costs,
    draft: DraftConfig | None = None,
    temperature: float = 0.0,
) -> Recording:
    """The rounds of one call of `generate(..., trace=True)` at a fixed length.

    Args:
      results: of requests that were decoded together, with their logs.
      costs: measured for as many requests.
      draft: that the confidences are from. Its calibration is recorded if it was made
        for such requests, see `decoding.schedule.offered`; None has none.
      temperature: of the requests; 0 is greedy.

    Raises:
      ValueError: no logs, or rounds that did not verify whole blocks.
    """
    require(len(results) > 0, "results", results, "one or more")
    logs: list[tuple[RoundLog, ...]] = []
    for result in results:
        if result.rounds is None:
            raise ValueError("a result has no rounds; generate with trace=True")
        logs.append(result.rounds)
    widths = {len(log.confidence) for rows in logs for log in rows}
    lengths = {log.drafted for rows in logs for log in rows}
    whole = len(lengths) == 1 and widths == lengths and min(lengths) > 0
    require(whole, "rounds", sorted(lengths), "one fixed length with confidences")
    (n,) = lengths
    rounds, batch = max(len(rows) for rows in logs), len(logs)
    recording = Recording(
        np.zeros((rounds, batch), np.int32),
        np.zeros((rounds, batch, n), np.float32),
        np.zeros((rounds, batch), np.int32),
        np.zeros((rounds, batch), bool),
        table_of(costs, batch),
        *_calibration(draft, temperature, n),
    )
    for row, own in enumerate(logs):
        for at, log in enumerate(own):
            recording.generation[at, row] = log.position
            recording.confidence[at, row] = log.confidence
            recording.accepted[at, row] = log.accepted
            recording.live[at, row] = True
    return recording


def _calibration(
    draft: DraftConfig | None, temperature: float, n: int
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Temperatures and shifts of n drafts, where serving uses them."""
    if draft is None or draft.calibrated_at is None:
        return None, None
    if (draft.calibrated_at < GREEDY_BELOW) != (temperature < GREEDY_BELOW):
        return None, None
    found = (draft.confidence_temperatures, draft.confidence_shifts)
    temperatures, shifts = (None if one is None else one[:n] for one in found)
    return temperatures, shifts


def joined(parts: Sequence[Recording]) -> Recording:
    """Recordings of as many requests, one behind the other.

    Costs and calibration are the first one's.
    """
    names = ("generation", "confidence", "accepted", "live")
    arrays = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in names
    }
    return dataclasses.replace(parts[0], **arrays)


def save_recording(path: str | Path, recording: Recording) -> None:
    """Writes JSON lines, whole or not at all."""
    costs = recording.costs
    first = {
        "format": FORMAT,
        "requests": recording.live.shape[1],
        "drafts": recording.confidence.shape[2],
        "costs": {
            "rows": np.asarray(costs.curve.sizes).tolist(),
            "ms": np.asarray(costs.curve.ms).tolist(),
            "slope": float(costs.slope),
            "sampler_ms": np.asarray(costs.sampler_ms).tolist(),
            "draft_ms": np.asarray(costs.draft_ms).tolist(),
        },
        "temperatures": recording.temperatures,
        "shifts": recording.shifts,
    }
    lines = [json.dumps(first)]
    for at in range(len(recording.live)):
        line = {
            "round": at,
            "live": recording.live[at].tolist(),
            "generation": recording.generation[at].tolist(),
            "confidence": recording.confidence[at].tolist(),
            "accepted": recording.accepted[at].tolist(),
        }
        lines.append(json.dumps(line))
    replace_text(Path(path), "\n".join(lines) + "\n")


def load_recording(path: str | Path) -> Recording:
    """Reads what `save_recording` wrote.

    Raises:
      ValueError: no such file, or lines of another form.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    try:
        first, *rounds = [json.loads(line) for line in text.splitlines()]
        require(first["format"] == FORMAT, "format", first["format"], str(FORMAT))
        recording = _from_lines(first, rounds)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(
            f"{path} is no log of rounds ({type(error).__name__}: {error}); write one "
            "with `dspark-jax replay --record`"
        ) from None
    return recording


def _from_lines(first: dict[str, Any], rounds: list[dict[str, Any]]) -> Recording:
    batch, drafts, costs = first["requests"], first["drafts"], first["costs"]
    recording = Recording(
        np.asarray([line["generation"] for line in rounds], np.int32),
        np.asarray([line["confidence"] for line in rounds], np.float32),
        np.asarray([line["accepted"] for line in rounds], np.int32),
        np.asarray([line["live"] for line in rounds], bool),
        CostTable(
            curve(costs["rows"], costs["ms"]),
            np.asarray(costs["slope"], np.float32),
            np.asarray(costs["sampler_ms"], np.float32),
            np.asarray(costs["draft_ms"], np.float32),
        ),
        *_tuples(first, drafts),
    )
    shape = (len(rounds), batch)
    found = recording.confidence.shape
    require(found == (*shape, drafts), "confidence", found, f"{(*shape, drafts)}")
    for name in ("generation", "accepted", "live"):
        found = getattr(recording, name).shape
        require(found == shape, name, found, f"{shape}")
    return recording


def _tuples(
    first: dict[str, Any], drafts: int
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Temperatures and shifts of a log, checked as `survival` checks them."""
    found = (first["temperatures"], first["shifts"])
    survival(np.zeros(drafts), *found)
    temperatures, shifts = (
        None if one is None else tuple(map(float, one)) for one in found
    )
    return temperatures, shifts


def replay(
    recording: Recording,
    policy: Policy,
    temperatures: Temperatures | None = None,
    shifts: Shifts | None = None,
) -> Score:
    """Scores a policy on recorded rounds, with the functions that serve.

    Args:
      recording: rounds of whole blocks.
      policy: any; `Fixed(n)` verifies the first n drafts, `Fixed(0)` drafts nothing.
      temperatures: of the confidences, one a recorded position, see `DraftConfig`.
        With `shifts` None too, those of the recording; ones have the head's own word.
      shifts: likewise; None beside temperatures is 0.

    Raises:
      ValueError: a policy with more drafts than were recorded, another number of
        temperatures or shifts, a temperature that is not > 0.
    """
    rounds, batch, n = recording.confidence.shape
    asked = policy.draft_length
    used = n if asked is None else asked
    require(used <= n, "draft_length", asked, f"at most {n}, as were recorded")
    table = recording.costs
    if temperatures is None and shifts is None:
        temperatures, shifts = recording.temperatures, recording.shifts
    # Of whole blocks, as a position's chance does not depend on those behind it.
    chances = survival(recording.confidence, temperatures, shifts).astype(np.float32)
    chances = np.where(recording.live[..., None], chances, np.float32(0))
    memory: Memory | None = None
    made = True
    tokens = verified = requests = drafting = 0
    milliseconds = 0.0
    for at in range(rounds):
        live, accepted = recording.live[at], recording.accepted[at]
        count = int(live.sum())
        if isinstance(policy, Scheduled):
            offer = _offer(recording, chances, at, used)
            if memory is None:
                memory = decide.first_memory(policy, offer)
            else:
                memory = decide.with_offer(memory, offer, jnp.bool_(made))
            rows = np.asarray(_lengths(policy, table, memory, jnp.asarray(live), False))
            drafts = made
        else:
            rows = np.where(live, 1 + used, 0)
            drafts = used > 0
        kept = np.minimum(accepted, np.maximum(rows - 1, 0))
        tokens += int((1 + kept)[live].sum())
        verified += int((rows - 1)[live].sum())
        requests, drafting = requests + count, drafting + drafts
        milliseconds += float(table.round_ms(count, int(rows.sum()), drafts))
        if isinstance(policy, Scheduled) and memory is not None:
            memory, wants = _after(
                policy, table, memory, jnp.asarray(rows), jnp.asarray(kept)
            )
            made = bool(wants.any())
    return Score(
        rounds=rounds,
        tokens=tokens,
        milliseconds=milliseconds,
        verified=verified / requests,
        accepted_length=tokens / requests,
        drafting=drafting / rounds,
    )


_lengths = jax.jit(decide.lengths, static_argnames=("policy", "drawn"))


@functools.partial(jax.jit, static_argnames="policy")
def _after(
    policy: Scheduled,
    table: CostTable,
    memory: Memory,
    rows: jax.Array,
    kept: jax.Array,
) -> tuple[Memory, jax.Array]:
    """The memory behind a round, and for whom it drafts."""
    memory = decide.remember(policy, memory, rows, kept)
    return memory, decide.wants_draft(policy, table, memory, None)


def _offer(recording: Recording, chances: np.ndarray, at: int, used: int) -> Offer:
    arrays = (
        chances[at, :, :used],
        recording.confidence[at, :, :used],
        recording.live[at],
        recording.generation[at],
    )
    return Offer(*map(jnp.asarray, arrays))
