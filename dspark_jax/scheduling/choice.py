"""What to calibrate with: nothing, temperatures, or temperatures with shifts.

More freedom fits the rounds at hand better, chance included. So each kind of fit is
made on some rounds and measured on others, and the one that is best there is fitted
again on all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from dspark_jax.scheduling.calibration import Fit, fit_sts
from dspark_jax.scheduling.calibration_metrics import metrics, summary
from dspark_jax.scheduling.platt import fit_platt
from dspark_jax.scheduling.reliability import BINS
from dspark_jax.scheduling.rounds import KnownRounds
from dspark_jax.scheduling.survival import Temperatures, survival

Kind = Literal["identity", "temperatures", "shifts"]
# The simplest first: it wins ties.
KINDS: tuple[Kind, ...] = ("identity", "temperatures", "shifts")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which kind of fit is best on rounds that it was not fitted on.

    Attributes:
      kind: of the least error, the simplest of equal ones.
      errors: calibration error of each kind, its mean over all positions.
    """

    kind: Kind
    errors: dict[Kind, float]


def fit_kind(
    kind: Kind,
    rounds: KnownRounds,
    grid: Temperatures | None = None,
    bins: int = BINS,
) -> Fit:
    """Fits rounds by one kind.

    Args:
      kind: "identity" leaves confidences as they are; "temperatures" is `fit_sts`,
        "shifts" is `fit_platt` with `default_shifts`.
      rounds: to fit.
      grid: increasing temperatures; None: `default_grid`.
      bins: of the calibration error.
    """
    fit = fit_platt if kind == "shifts" else fit_sts
    tried = np.ones(1) if kind == "identity" else grid
    return fit(rounds.logits, rounds.labels, tried, bins=bins, proposed=rounds.proposed)


def choose(
    fitted: KnownRounds,
    others: KnownRounds,
    grid: Temperatures | None = None,
    bins: int = BINS,
) -> Choice:
    """Fits some rounds by every kind and measures each on others.

    Args:
      fitted: to fit.
      others: to measure on, of other prompts. Their labels serve, overlaps where
        drafts are sampled: the mean of the outcomes, with less noise.
      grid: increasing temperatures; None: `default_grid`.
      bins: of the calibration error.

    Raises:
      ValueError: no round among the others proposed anything.
    """
    if not others.proposed.any():
        raise ValueError("`others` proposed nothing: there is nothing to choose by")
    errors: dict[Kind, float] = {}
    for kind in KINDS:
        fit = fit_kind(kind, fitted, grid, bins)
        chances = survival(others.logits, fit.temperatures, fit.shifts)
        found = metrics(chances, others.labels, bins, proposed=others.proposed)
        errors[kind] = summary(found)["ece"]
    return Choice(min(KINDS, key=errors.__getitem__), errors)
