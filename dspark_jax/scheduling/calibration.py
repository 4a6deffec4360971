"""Sequential temperature scaling: one temperature for each drafted position.

The draft's confidence head learns acceptance at sampling temperature 1 on its
training text. A fit makes its survival chances match what happens in use; the
order of confidences at one position stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dspark_jax.config import require
from dspark_jax.scheduling.reliability import BINS, expected_calibration_error
from dspark_jax.scheduling.survival import Temperatures, sigmoid
from dspark_jax.scheduling.survival import calibrated as calibrated
from dspark_jax.scheduling.survival import survival as survival


def default_grid() -> np.ndarray:
    """41 temperatures from 0.1 to 10, equally spaced in their logarithm."""
    return np.logspace(-1.0, 1.0, 41)


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """What a fit found.

    Attributes:
      temperatures: float64[N]; 1 where no round proposed the position.
      ece_before: float64[N]. Calibration error on the fitted rounds with
        temperature 1 everywhere; NaN where no round proposed the position.
      ece_after: float64[N]. With what was fitted. An error on the data of the fit,
        so a lower bound rather than an estimate of the error in use.
      ece_by_temperature: float64[N, G]. Of every temperature of the grid, those of
        the positions before being fixed already; with the best shift for each, if
        shifts are fitted.
      shifts: float64[N] of `fit_platt`, 0 where no round proposed the position; None
        of `fit_sts`.
    """

    temperatures: np.ndarray
    ece_before: np.ndarray
    ece_after: np.ndarray
    ece_by_temperature: np.ndarray
    shifts: np.ndarray | None = None


def prefix_labels(accepted: np.ndarray, positions: int) -> np.ndarray:
    """Whether each prefix stood: float64[S, N] of accepted counts int[S]."""
    steps = np.arange(positions)
    return (steps < np.asarray(accepted)[:, None]).astype(np.float64)


def fit_sts(
    logits: np.ndarray,
    prefix_mask: np.ndarray,
    grid: Temperatures | None = None,
    bins: int = BINS,
    *,
    proposed: np.ndarray | None = None,
    weights: np.ndarray | None = None,
) -> Fit:
    """Fits temperatures from left to right.

    With T_1..T_{k-1} fixed, T_k is the first (smallest) temperature of the grid
    with the least calibration error of the *running product* against prefix
    survival (DSpark paper, the section on calibration).

    Rounds may propose fewer drafts: position k is fitted on the rounds that
    proposed it and on no others, so a short round is no rejection. That needs lengths
    that were chosen without a look at the outcome. Rounds that were chosen to be
    long are the confident ones, and the fit is for such rounds; lengths that are all
    full are best.

    Args:
      logits: float[S, N]. Confidence logits of S rounds, as the head gave them.
      prefix_mask: float[S, N]. 1 where all drafts up to the position were
        accepted, else 0; or the chance of that, see `overlap_labels`.
      grid: increasing temperatures; None: `default_grid`.
      bins: of the calibration error.
      proposed: bool[S, N]. True, then False along a row; None: all True. What
        `logits` and `prefix_mask` hold where it is False is not read.
      weights: float[S] >= 0, of the rounds; None: 1.

    Raises:
      ValueError: arrays of other shapes, a grid that does not increase, values that
        are not finite.

    Example:
      >>> rng = np.random.default_rng(0)
      >>> z = 3 * rng.standard_normal((4000, 1))
      >>> chance = calibrated(z, [2.0])
      >>> fit_sts(z, chance).temperatures.round(1)
      array([2.])
    """
    grid = increasing("grid", default_grid() if grid is None else grid)
    require(grid[0] > 0, "grid", grid, "numbers > 0")
    settings = [(0.0, float(temperature)) for temperature in grid]
    fit, errors = fit_in_order(logits, prefix_mask, settings, bins, proposed, weights)
    return dataclasses.replace(fit, ece_by_temperature=errors, shifts=None)


def increasing(name: str, given: np.ndarray | Sequence[float]) -> np.ndarray:
    """The values to try as float64[G].

    Raises:
      ValueError: not increasing, not finite, or none.
    """
    grid = np.asarray(given, np.float64)
    ok = grid.ndim == 1 and grid.size > 0 and bool(np.all(np.diff(grid) > 0))
    ok = ok and bool(np.all(np.isfinite(grid)))
    require(ok, name, given, "increasing finite numbers")
    return grid


def fit_in_order(
    logits: np.ndarray,
    prefix_mask: np.ndarray,
    settings: Sequence[tuple[float, float]],
    bins: int,
    proposed: np.ndarray | None,
    weights: np.ndarray | None,
) -> tuple[Fit, np.ndarray]:
    """What fits from left to right have in common.

    Args:
      logits: see `fit_sts`, as for all but the following.
      prefix_mask: see there.
      settings: C pairs of shift b and temperature T. For each position the first one
        with the least error is taken.
      bins: of the calibration error.
      proposed: see there.
      weights: see there.

    Returns:
      The fit, its `ece_by_temperature` empty, and float64[N, C]: the error of every
      setting at every position.
    """
    z, labels, mask = _rounds(logits, prefix_mask, proposed)
    rounds, positions = z.shape
    counted = np.ones(rounds) if weights is None else np.asarray(weights, np.float64)
    require(counted.shape == (rounds,), "weights", counted.shape, f"({rounds},)")
    found = np.tile([0.0, 1.0], (positions, 1))
    before, after = np.full(positions, np.nan), np.full(positions, np.nan)
    table = np.full((positions, len(settings)), np.nan)
    raw, fitted = np.ones(rounds), np.ones(rounds)
    for k in range(positions):
        raw = raw * sigmoid(z[:, k])
        rows = mask[:, k] & (counted > 0)
        if not rows.any():
            continue
        logit, reached = z[rows, k], fitted[rows]
        label, weight = labels[rows, k], counted[rows]
        before[k] = expected_calibration_error(raw[rows], label, bins, weight)
        for c, (shift, temperature) in enumerate(settings):
            pred = reached * sigmoid((logit + shift) / temperature)
            table[k, c] = expected_calibration_error(pred, label, bins, weight)
        # The first of equal minima.
        best = int(np.argmin(table[k]))
        found[k], after[k] = settings[best], table[k, best]
        fitted = fitted * sigmoid((z[:, k] + found[k, 0]) / found[k, 1])
    empty = np.empty((positions, 0))
    return Fit(found[:, 1], before, after, empty, found[:, 0]), table


def _rounds(
    logits: np.ndarray, labels: np.ndarray, proposed: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Checked float64 arrays; 0 where nothing was proposed."""
    z, y = np.asarray(logits, np.float64), np.asarray(labels, np.float64)
    require(z.ndim == 2, "logits", z.shape, "two axes, [S, N]")
    mask = np.ones(z.shape, bool) if proposed is None else np.asarray(proposed, bool)
    for name, x in (("prefix_mask", y), ("proposed", mask)):
        require(x.shape == z.shape, name, x.shape, f"the shape of `logits` {z.shape}")
    require(
        not np.any(mask[:, 1:] & ~mask[:, :-1]),
        "proposed",
        "a gap",
        "True, then False along a row: proposals are prefixes",
    )
    z, y = np.where(mask, z, 0.0), np.where(mask, y, 0.0)
    require(bool(np.isfinite(z).all()), "logits", "not finite", "finite numbers")
    ok = bool(np.all((y >= 0) & (y <= 1)))
    require(ok, "prefix_mask", "outside [0, 1]", "numbers in [0, 1]")
    return z, y, mask
