"""From confidences to the chance that a drafted prefix survives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark_jax.config import require

Temperatures = np.ndarray | Sequence[float]


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) in float64, without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def calibrated(
    logits: np.ndarray, temperatures: Temperatures | None = None
) -> np.ndarray:
    """Confidences: sigmoid(logit / T) by position.

    Args:
      logits: float[..., N]. Of the draft's confidence head; position k's is about
        draft k, given that the drafts before it stand.
      temperatures: N numbers > 0, one a position; None: 1 everywhere.

    Returns:
      float64[..., N] in [0, 1].

    Raises:
      ValueError: another number of temperatures, or one that is not > 0.

    Example:
      >>> calibrated(np.array([0.0, 4.0]), [1.0, 2.0]).round(3)
      array([0.5  , 0.881])
    """
    logits = np.asarray(logits, np.float64)
    if temperatures is None:
        return sigmoid(logits)
    scale = np.asarray(temperatures, np.float64)
    positions = logits.shape[-1] if logits.ndim else 0
    require(
        scale.shape == (positions,),
        "temperatures",
        temperatures,
        f"{positions} numbers, one a position",
    )
    require(
        bool(np.all(np.isfinite(scale) & (scale > 0))),
        "temperatures",
        temperatures,
        "finite numbers > 0",
    )
    return sigmoid(logits / scale)


def survival(
    logits: np.ndarray, temperatures: Temperatures | None = None
) -> np.ndarray:
    """Chance that drafts 1..k all stand: the running product of confidences.

    a_k = prod_{i <= k} sigmoid(z_i / T_i) (DSpark paper, the section on calibration).

    Args:
      logits: float[..., N].
      temperatures: see `calibrated`.

    Returns:
      float64[..., N], falling along the last axis.
    """
    return np.cumprod(calibrated(logits, temperatures), axis=-1)
