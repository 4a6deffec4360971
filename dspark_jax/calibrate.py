"""Calibration of a draft's confidences on prompts: decode, fit, measure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint.calibrated import write_temperatures
from dspark_jax.config import require
from dspark_jax.evaluation.prompts import held_out
from dspark_jax.generate import Prompt, generate
from dspark_jax.model import Model
from dspark_jax.results import RoundLog
from dspark_jax.scheduling.calibration import Fit, default_grid
from dspark_jax.scheduling.calibration_metrics import Metrics, metrics
from dspark_jax.scheduling.choice import Choice, Kind, choose, fit_kind
from dspark_jax.scheduling.platt import default_shifts
from dspark_jax.scheduling.reliability import BINS
from dspark_jax.scheduling.rounds import KnownRounds, gather_rounds
from dspark_jax.scheduling.survival import Temperatures, survival
from dspark_jax.settings import SamplingParams

logger = logging.getLogger(__name__)

# Prompts done, prompts in all.
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """What a calibration found.

    Attributes:
      temperatures: one for each drafted position.
      shifts: one for each drafted position; None if none were fitted.
      choice: why these; None if there was no choice.
      calibrated_at: sampling temperature of the rounds.
      fit: on the prompts of the fit.
      before: on the other prompts, with temperature 1 everywhere.
      after: on the other prompts, with temperatures and shifts.
      rounds: those of the other prompts.
      counts: prompts and rounds of both halves.
      bins: of the calibration error.
      notes: what to mind about this fit.
    """

    temperatures: tuple[float, ...]
    shifts: tuple[float, ...] | None
    choice: Choice | None
    calibrated_at: float
    fit: Fit
    before: Metrics
    after: Metrics
    rounds: KnownRounds = dataclasses.field(repr=False)
    counts: dict[str, int]
    bins: int
    notes: tuple[str, ...]

    def save(self, draft: str | Path) -> None:
        """Stores temperatures and shifts with a draft, see `write_temperatures`."""
        write_temperatures(draft, self.temperatures, self.calibrated_at, self.shifts)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        fit = {
            name: [None if np.isnan(x) else float(x) for x in getattr(self.fit, name)]
            for name in ("ece_before", "ece_after")
        }
        return {
            "temperatures": list(self.temperatures),
            "shifts": None if self.shifts is None else list(self.shifts),
            "choice": None if self.choice is None else dataclasses.asdict(self.choice),
            "calibrated_at": self.calibrated_at,
            "bins": self.bins,
            "counts": self.counts,
            "fit": fit,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "notes": list(self.notes),
        }


def calibrate(
    model: Model,
    prompts: Sequence[Prompt],
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    holdout: float = 0.25,
    seed: int = 0,
    chat: bool = True,
    grid: Temperatures | None = None,
    shift: bool = True,
    bins: int = BINS,
    batch: int = 8,
    progress: Progress = lambda done, total: None,
) -> Calibration:
    """Fits temperatures to a draft's confidences and measures what they are worth.

    Decodes the prompts with the draft's full length, so that nothing is cut by a
    decision that depends on confidences. A share of the prompts is kept from the
    fit, and `before` and `after` are measured on those, against outcomes. Where
    drafts are sampled, the fit itself uses overlaps, see `overlap_labels`.

    With `shift`, half of the prompts of the fit choose between confidences as they are,
    temperatures, and temperatures with shifts, each fitted on the other half; the
    best is then fitted on all prompts of the fit (`scheduling.choice`).

    Acceptance depends on the sampling temperature, so a fit is for one.

    Args:
      model: with a draft that has a confidence head.
      prompts: texts or conversations, each of them once; neither those that the
        draft was trained on, where it is too sure of itself, nor the held-out set,
        which is for measuring.
      temperature: of sampling; 0 is greedy.
      max_new_tokens: tokens a prompt.
      holdout: share of the prompts that is kept from the fit, at least one. Which
        ones depends on the texts alone.
      seed: prompt i is sampled with `seed + i`.
      chat: whether prompts are rendered as chats.
      grid: temperatures to try, see `fit_sts`.
      shift: whether shifts may be fitted as well, where they help; False fits
        temperatures, whatever they are worth.
      bins: of the calibration error.
      batch: prompts decoded together.
      progress: called as prompts are done.

    Raises:
      ValueError: bad arguments; a model without a draft or a confidence head;
        prompts of the held-out set.

    Example:
      >>> import dspark_jax as dspark
      >>> model = dspark.load("smollm2-135m")  # doctest: +SKIP
      >>> found = dspark.calibrate(model, texts)  # doctest: +SKIP
      >>> found.save("my-draft")  # doctest: +SKIP
    """
    draft = model.spec.draft
    if draft is None or not draft.confidence:
        what = "no draft" if draft is None else "a draft without a confidence head"
        raise ValueError(f"model {model.name!r} has {what}: nothing to calibrate")
    sampling = SamplingParams(temperature=temperature)
    require(isinstance(batch, int) and batch >= 1, "batch", batch, "int >= 1")
    parts = split(prompts, holdout)
    # Both halves in one row, so that one batch at most is not full.
    texts, logs = [*parts[0], *parts[1]], []
    for first in range(0, len(texts), batch):
        group = texts[first : first + batch]
        results = generate(
            model,
            group,
            max_new_tokens=max_new_tokens,
            sampling=[
                dataclasses.replace(sampling, seed=seed + first + i)
                for i in range(len(group))
            ],
            # All of them: a shorter round looks like a rejection.
            draft_length=draft.gamma,
            chat=chat,
            trace=True,
        )
        for result in results:
            cut = result.finish_reason in ("length", "cache_full")
            limit = len(result.tokens) if cut else max_new_tokens
            logs.append((result.rounds, limit))
        progress(len(logs), len(texts))
    first = len(parts[0])
    found = [gather_rounds(half, draft.gamma) for half in (logs[:first], logs[first:])]
    counts = {
        "fit_prompts": len(parts[0]),
        "fit_rounds": len(found[0]),
        "evaluation_prompts": len(parts[1]),
        "evaluation_rounds": len(found[1]),
    }
    if not all(rounds.proposed.any() for rounds in found):
        raise ValueError(
            f"no draft was verified with `max_new_tokens` {max_new_tokens}; give more "
            "tokens or more prompts"
        )
    choice = _choice(parts[0], logs, draft.gamma, grid, bins) if shift else None
    made = _calibration(found[0], found[1], choice, temperature, counts, grid, bins)
    if shift and choice is None:
        few = "too few prompts to choose by: temperatures without shifts"
        return dataclasses.replace(made, notes=(few, *made.notes))
    return made


def _choice(
    prompts: Sequence[Prompt],
    logs: Sequence[tuple[Sequence[RoundLog], int]],
    positions: int,
    grid: Temperatures | None,
    bins: int,
) -> Choice | None:
    """What half of the prompts of the fit say of the other half's fits.

    Args:
      prompts: of the fit.
      logs: theirs, then others.
      positions: N.
      grid: see `calibrate`.
      bins: see there.

    Returns:
      None where a half has nothing to say.
    """
    if len(prompts) < 2:
        return None
    judges = {_key(prompt) for prompt in split(prompts, 0.5)[1]}
    halves: tuple[list, list] = ([], [])
    for prompt, log in zip(prompts, logs, strict=False):
        halves[_key(prompt) in judges].append(log)
    fitted, others = (gather_rounds(half, positions) for half in halves)
    if not (fitted.proposed.any() and others.proposed.any()):
        return None
    return choose(fitted, others, grid, bins)


def _calibration(
    fitted: KnownRounds,
    others: KnownRounds,
    choice: Choice | None,
    temperature: float,
    counts: dict[str, int],
    grid: Temperatures | None,
    bins: int,
) -> Calibration:
    grid = default_grid() if grid is None else np.asarray(grid, np.float64)
    kind: Kind = "temperatures" if choice is None else choice.kind
    fit = fit_kind(kind, fitted, grid, bins)

    def measured(*scaling: np.ndarray | None) -> Metrics:
        chances = survival(others.logits, *scaling)
        return metrics(chances, others.outcomes, bins, proposed=others.proposed)

    after = measured(fit.temperatures, fit.shifts)
    return Calibration(
        temperatures=tuple(float(t) for t in fit.temperatures),
        shifts=None if fit.shifts is None else tuple(float(b) for b in fit.shifts),
        choice=choice,
        calibrated_at=float(temperature),
        fit=fit,
        before=measured(),
        after=after,
        rounds=others,
        counts=counts,
        bins=bins,
        notes=tuple(_notes(kind, fit, after, grid)),
    )


def split(
    prompts: Sequence[Prompt], holdout: float
) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts to fit on, prompts to measure on); no prompt is in both.

    A hash of the text decides, so the order of the prompts does not matter.

    Raises:
      ValueError: fewer than two prompts, a share out of range, prompts of the
        held-out set.
    """
    if isinstance(prompts, str) or any(isinstance(one, Mapping) for one in prompts):
        what = "text" if isinstance(prompts, str) else "conversation"
        raise ValueError(f"`prompts` is one {what}; give a list of at least two")
    stripped = [one.strip() if isinstance(one, str) else one for one in prompts]
    known = {_key(prompt): prompt for prompt in stripped}
    require(len(known) >= 2, "prompts", len(known), "two different texts or more")
    require(0 < holdout < 1, "holdout", holdout, "(0, 1)")
    reserved = {text.strip() for domain in held_out().values() for text in domain}
    leaking = [t for one in known.values() for t in _texts(one) if t in reserved]
    if leaking:
        raise ValueError(
            f"`prompts` has {len(leaking)} of the held-out set ({leaking[0][:40]!r}): "
            "those are for measuring; calibrate on others"
        )
    count = min(max(1, round(holdout * len(known))), len(known) - 1)
    ranked = sorted(known, key=lambda t: hashlib.sha256(t.encode()).hexdigest())
    kept = set(ranked[:count])
    return (
        [prompt for key, prompt in known.items() if key not in kept],
        [prompt for key, prompt in known.items() if key in kept],
    )


def _key(prompt: Prompt) -> str:
    """The same for the same prompt."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def _texts(prompt: Prompt) -> list[str]:
    """What is said in a prompt, turn by turn."""
    if isinstance(prompt, str):
        return [prompt]
    return [str(turn.get("content", "")).strip() for turn in prompt]


def _notes(kind: Kind, fit: Fit, after: Metrics, grid: np.ndarray) -> list[str]:
    def places(where: np.ndarray) -> str:
        return ", ".join(str(k + 1) for k in np.flatnonzero(where))

    notes, known = [], np.isfinite(fit.ece_after)
    if kind == "identity":
        notes.append(
            "no fit made confidences better on prompts it was not made on: they stay "
            "as they are"
        )
    ends = np.isin(fit.temperatures, grid[[0, -1]]) & known
    if kind != "identity" and ends.any() and grid.size > 1:
        notes.append(
            f"the temperature of position {places(ends)} is at an end of the grid: one "
            "temperature cannot make these confidences right"
        )
    if fit.shifts is not None:
        ends = np.isin(fit.shifts, default_shifts()[[0, -1]]) & known
        if ends.any():
            notes.append(
                f"the shift of position {places(ends)} is at an end of its grid"
            )
    if not known.all():
        notes.append(
            f"no round proposed position {places(~known)}: its temperature is 1"
        )
    worst = float(np.nanmax(after.noise))
    if worst > 0.02:
        notes.append(
            f"{int(after.count.max())} rounds were measured: chance alone gives an "
            f"error of up to {worst:.3f}; use more prompts"
        )
    return notes
