"""Measures a draft: prompts decoded with a log of rounds, and figures of the log."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from dspark_jax.config import require
from dspark_jax.evaluation.acceptance import (
    Acceptance,
    Rounds,
    acceptance,
    rounds_of,
    whole_rounds,
)
from dspark_jax.evaluation.acceptance_sweep import THRESHOLDS, SweepPoint, sweep
from dspark_jax.evaluation.compare import Settings, compare, summarise, warm_up
from dspark_jax.evaluation.prompts import held_out
from dspark_jax.generate import Prompt, generate
from dspark_jax.model import Model
from dspark_jax.results import Result, RoundLog
from dspark_jax.scheduling import Metrics, metrics, survival
from dspark_jax.settings import Buckets, SamplingParams

# As in the reference's evaluator.
QUALITY_BINS = 20


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the rounds of some prompts show.

    Attributes:
      prompts: how many.
      tokens: generated, those of rounds that the limit cut included.
      acceptance: of the rounds that the limit could not cut.
      quality: of the draft's confidences as predictions of `acceptance.survival`, by
        position: calibration error in 20 bins, Brier score, AUC, mean prediction; None
        without a head.
      sweep: threshold by threshold; () without a head.
    """

    prompts: int
    tokens: int
    acceptance: Acceptance
    quality: Metrics | None
    sweep: tuple[SweepPoint, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        quality = None if self.quality is None else self.quality.to_json()
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            **self.acceptance.to_json(),
            "predicted": [] if quality is None else quality["prediction"],
            "quality": quality,
            "sweep": [point.to_json() for point in self.sweep],
        }


@dataclasses.dataclass(frozen=True)
class AtTemperature:
    """Figures at one temperature.

    Attributes:
      temperature: 0 is greedy.
      domains: figures by domain.
      overall: of all domains, their rounds pooled.
      speed: tokens a second with drafts over those without, see `compare`; None
        unless asked for.
      logs: rounds by domain, one tuple a prompt, those that the limit could cut left
        out.
    """

    temperature: float
    domains: Mapping[str, Figures]
    overall: Figures
    speed: float | None
    logs: Mapping[str, Sequence[tuple[RoundLog, ...]]] = dataclasses.field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, without the logs."""
        return {
            "temperature": self.temperature,
            "domains": {name: one.to_json() for name, one in self.domains.items()},
            "overall": self.overall.to_json(),
            "speed_ratio": self.speed,
        }


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found.

    Attributes:
      model: its name.
      dtype: of the target.
      draft_length: drafts verified a round.
      max_new_tokens: limit of every prompt.
      temperatures: one entry each, in the order asked for.
    """

    model: str
    dtype: str
    draft_length: int
    max_new_tokens: int
    temperatures: tuple[AtTemperature, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, without the logs."""
        fields = ("model", "dtype", "draft_length", "max_new_tokens")
        head = {name: getattr(self, name) for name in fields}
        return {**head, "temperatures": [one.to_json() for one in self.temperatures]}


def evaluate(
    model: Model,
    prompts: Mapping[str, Sequence[Prompt]] | None = None,
    *,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_new_tokens: int = 256,
    draft_length: int | None = None,
    batch: int = 8,
    chat: bool = True,
    seed: int = 0,
    thresholds: Sequence[float] = THRESHOLDS,
    speed: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> Evaluation:
    """Decodes prompts with a fixed draft length and measures what stands.

    Prompt i, over all domains in order, draws from seed + i, so a run can be repeated.

    Args:
      model: with a draft.
      prompts: by domain; None takes the held-out prompts of this package.
      temperatures: each is a run over all prompts; 0 is greedy.
      max_new_tokens: a prompt.
      draft_length: drafts verified a round, 1..gamma; None is gamma.
      batch: prompts decoded together, at most.
      chat: whether the model's chat template is rendered.
      seed: of prompt 0.
      thresholds: of the sweep, each in [0, 1].
      speed: also run every prompt plainly and with drafts, taking turns, one at a
        time, for the ratio of speeds.
      progress: called with what is being done.

    Raises:
      ValueError: a model without a draft, or arguments out of range.

    Example:
      >>> import dspark_jax as dspark
      >>> model = dspark.testing.tiny_model()
      >>> found = dspark.evaluate(
      ...     model, {"letters": ["ab", "xyz"]}, temperatures=[0.0], max_new_tokens=8,
      ...     chat=False,
      ... )
      >>> figures = found.temperatures[0].domains["letters"]
      >>> figures.prompts, 1 <= figures.acceptance.accepted_length <= 5
      (2, True)
    """
    prompts = held_out() if prompts is None else prompts
    flat = [(domain, one) for domain, texts in prompts.items() for one in texts]
    require(bool(flat), "prompts", dict(prompts), "at least one prompt")
    largest = Buckets().batch[-1]
    require(1 <= batch <= largest, "batch", batch, f"1..{largest}")
    top = 2**64 - len(flat)
    require(0 <= seed <= top, "seed", seed, f"0..{top}")
    require(len(temperatures) > 0, "temperatures", temperatures, "at least one number")
    for threshold in thresholds:
        require(0 <= threshold <= 1, "threshold", threshold, "[0, 1]")
    settings = [SamplingParams(temperature=t) for t in temperatures]
    whole = model.spec.gamma if draft_length is None else draft_length
    n = model.spec.check_draft_length(whole)
    if n == 0:
        why = "it has no draft" if model.spec.draft is None else "`draft_length` is 0"
        raise ValueError(
            f"there is nothing to measure on {model.name}: {why}; load a draft, and "
            "verify at least one token a round"
        )
    options = dict(max_new_tokens=max_new_tokens, draft_length=n, chat=chat)
    found = []
    for sampling in settings:
        at = f"temperature {sampling.temperature:g}"
        runs: dict[str, list[_Run]] = {domain: [] for domain in prompts}
        for part in _groups(len(flat), batch):
            progress(f"{at}: prompts {part.start + 1} to {part.stop} of {len(flat)}")
            results = generate(
                model,
                [flat[i][1] for i in part],
                sampling=[dataclasses.replace(sampling, seed=seed + i) for i in part],
                trace=True,
                **options,
            )
            for i, result in zip(part, results, strict=True):
                runs[flat[i][0]].append(_run_of(result, max_new_tokens))
        faster = None
        if speed:
            progress(f"{at}: plain against drafts")
            one = Settings(n, max_new_tokens, sampling.temperature, chat)
            faster = _speed(model, prompts, one)
        found.append(
            AtTemperature(
                temperature=sampling.temperature,
                domains={d: _figures(r, thresholds) for d, r in runs.items()},
                overall=_figures([r for one in runs.values() for r in one], thresholds),
                speed=faster,
                logs={d: [run.logs for run in one] for d, one in runs.items()},
            )
        )
    return Evaluation(
        model.name, model.spec.target.dtype, n, max_new_tokens, tuple(found)
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """What is kept of one prompt: tokens generated and its whole rounds."""

    tokens: int
    logs: tuple[RoundLog, ...]


def _run_of(result: Result, max_new_tokens: int) -> _Run:
    committed = len(result.state.tokens)
    limit = committed - len(result.tokens) + max_new_tokens
    limit = min(limit, result.state.batch.capacity)
    return _Run(len(result.tokens), tuple(whole_rounds(result.rounds or (), limit)))


def _groups(count: int, most: int) -> list[range]:
    """Ranges of nearly equal length, so that they share a batch bucket."""
    groups = -(-count // most)
    ends = [count * i // groups for i in range(groups + 1)]
    return [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def _figures(runs: Sequence[_Run], thresholds: Sequence[float]) -> Figures:
    rounds = rounds_of(log for run in runs for log in run.logs)
    return Figures(
        prompts=len(runs),
        tokens=sum(run.tokens for run in runs),
        acceptance=acceptance(rounds),
        quality=_quality(rounds),
        sweep=() if rounds.confidence is None else sweep(rounds, thresholds),
    )


def _quality(rounds: Rounds) -> Metrics | None:
    if rounds.confidence is None:
        return None
    proposed = rounds.proposed_at()
    chances = survival(np.where(proposed, rounds.confidence, 0.0))
    return metrics(chances, rounds.accepted_at(), QUALITY_BINS, proposed=proposed)


def _speed(
    model: Model, prompts: Mapping[str, Sequence[Prompt]], settings: Settings
) -> float | None:
    # Conversations are handed on to `stream` as they are.
    asked = cast(Mapping[str, Sequence[str]], prompts)
    warm_up(model, [one for texts in asked.values() for one in texts], settings)
    return summarise(list(compare(model, asked, settings))).ratio
