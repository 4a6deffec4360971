"""Platt scaling from left to right: a shift and a temperature for each position.

A temperature turns confidences about one half. A head that is off by a shift there (it
says 0.49 where 0.41 stand) is right at no temperature; a shift of its logit moves it:

    confidence_k = sigmoid((z_k + b_k) / T_k)

That is Platt scaling, sigmoid(A z + B) with A = 1/T and B = b/T (Platt, Probabilistic
outputs for support vector machines, 1999), fitted as `fit_sts` fits temperatures.
The order of confidences at one position stays.

1271 pairs follow chance further than 41 temperatures do, so a fit wants more rounds;
`scheduling.choice` decides on other rounds whether it helps.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dspark_jax.config import require
from dspark_jax.scheduling.calibration import (
    Fit,
    default_grid,
    fit_in_order,
    increasing,
)
from dspark_jax.scheduling.reliability import BINS
from dspark_jax.scheduling.survival import Shifts, Temperatures


def default_shifts() -> np.ndarray:
    """31 shifts from -1.5 to 1.5, a tenth apart."""
    return np.arange(-15, 16) / 10


def settings_in_order(shifts: Shifts, grid: Temperatures) -> list[tuple[float, float]]:
    """Pairs of shift and temperature, what changes confidences least first.

    By |b|, then by |log T|; of b and -b the negative one comes first, and of T and
    1/T the smaller one. So (0, 1) wins a tie against everything, and (0, T) against
    every other shift.
    """
    pairs = [(float(b), float(t)) for b in shifts for t in grid]
    # T and 1/T of the grid are not reciprocal to the last bit.
    return sorted(
        pairs,
        key=lambda pair: (
            abs(pair[0]),
            round(abs(float(np.log(pair[1]))), 9),
            pair,
        ),
    )


def fit_platt(
    logits: np.ndarray,
    prefix_mask: np.ndarray,
    grid: Temperatures | None = None,
    shifts: Shifts | None = None,
    bins: int = BINS,
    *,
    proposed: np.ndarray | None = None,
    weights: np.ndarray | None = None,
) -> Fit:
    """Fits shifts and temperatures from left to right.

    With the pairs of positions 1..k-1 fixed, (b_k, T_k) is the pair with the least
    calibration error of the running product against prefix survival; of equal ones
    the first in `settings_in_order`.

    Args:
      logits: float[S, N], see `fit_sts`.
      prefix_mask: float[S, N], see there.
      grid: increasing temperatures; None: `default_grid`.
      shifts: increasing; None: `default_shifts`.
      bins: of the calibration error.
      proposed: bool[S, N], see there.
      weights: float[S], see there.

    Raises:
      ValueError: see there; shifts that do not increase.

    Example:
      >>> from dspark_jax.scheduling.survival import calibrated
      >>> rng = np.random.default_rng(0)
      >>> z = 3 * rng.standard_normal((4000, 1))
      >>> found = fit_platt(z, calibrated(z, [2.0], [-0.7]), grid=[1.0, 2.0])
      >>> found.shifts, found.temperatures
      (array([-0.7]), array([2.]))
    """
    heat = increasing("grid", default_grid() if grid is None else grid)
    require(heat[0] > 0, "grid", heat, "numbers > 0")
    moves = increasing("shifts", default_shifts() if shifts is None else shifts)
    settings = settings_in_order(moves, heat)
    fit, errors = fit_in_order(logits, prefix_mask, settings, bins, proposed, weights)
    used = np.asarray([t for _, t in settings])
    best = np.stack([errors[:, used == t].min(axis=1) for t in heat], axis=1)
    return dataclasses.replace(fit, ece_by_temperature=best)
