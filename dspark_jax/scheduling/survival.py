"""From confidences to the chance that a drafted prefix survives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark_jax.config import require

Temperatures = np.ndarray | Sequence[float]
Shifts = np.ndarray | Sequence[float]


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) in float64, without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def calibrated(
    logits: np.ndarray,
    temperatures: Temperatures | None = None,
    shifts: Shifts | None = None,
) -> np.ndarray:
    """Confidences: sigmoid((logit + b) / T) by position.

    The same in a program: `decoding.schedule.confidences`.

    Args:
      logits: float[..., N]. Of the draft's confidence head; position k's is about
        draft k, given that the drafts before it stand.
      temperatures: T, N numbers > 0, one a position; None: 1 everywhere.
      shifts: b, N numbers, added before the division; None: 0 everywhere.

    Returns:
      float64[..., N] in [0, 1].

    Raises:
      ValueError: another number of temperatures or shifts, a temperature that is not
        > 0, a shift that is not finite.

    Example:
      >>> calibrated(np.array([0.0, 4.0]), [1.0, 2.0]).round(3)
      array([0.5  , 0.881])
    """
    scaled = np.asarray(logits, np.float64)
    positions = scaled.shape[-1] if scaled.ndim else 0
    if shifts is not None:
        scaled = scaled + _by_position("shifts", shifts, positions)
    if temperatures is not None:
        scale = _by_position("temperatures", temperatures, positions)
        require(bool(np.all(scale > 0)), "temperatures", temperatures, "numbers > 0")
        scaled = scaled / scale
    return sigmoid(scaled)


def survival(
    logits: np.ndarray,
    temperatures: Temperatures | None = None,
    shifts: Shifts | None = None,
) -> np.ndarray:
    """Chance that drafts 1..k all stand: the running product of confidences.

    a_k = prod_{i <= k} sigmoid((z_i + b_i) / T_i) (DSpark paper, the section on
    calibration; there without b).

    Args:
      logits: float[..., N].
      temperatures: see `calibrated`.
      shifts: see `calibrated`.

    Returns:
      float64[..., N], falling along the last axis.
    """
    return np.cumprod(calibrated(logits, temperatures, shifts), axis=-1)


def _by_position(
    name: str, given: np.ndarray | Sequence[float], positions: int
) -> np.ndarray:
    """Checked float64[N]."""
    found = np.asarray(given, np.float64)
    ok = found.shape == (positions,) and bool(np.all(np.isfinite(found)))
    require(ok, name, given, f"{positions} numbers, one a position, all finite")
    return found
