"""Metrics of predicted prefix survival, by position and over all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dspark_jax.config import require
from dspark_jax.scheduling.reliability import (
    BINS,
    auroc,
    brier,
    calibration_noise,
    expected_calibration_error,
)

FIELDS = ("ece", "auc", "brier", "prediction", "label", "noise")


@dataclasses.dataclass(frozen=True, eq=False)
class Metrics:
    """By drafted position; NaN where nothing was proposed.

    Attributes:
      count: int64[N]. Rounds that proposed the position.
      ece: float64[N]. Expected calibration error.
      auc: float64[N]. NaN also where every label is the same.
      brier: float64[N].
      prediction: float64[N]. Mean predicted survival.
      label: float64[N]. Mean survival.
      noise: float64[N]. The calibration error to expect of right predictions, from
        the number of rounds alone.
    """

    count: np.ndarray
    ece: np.ndarray
    auc: np.ndarray
    brier: np.ndarray
    prediction: np.ndarray
    label: np.ndarray
    noise: np.ndarray

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, with `overall`; None stands for NaN."""
        columns = {name: _plain(getattr(self, name)) for name in FIELDS}
        return {"count": self.count.tolist(), **columns, "overall": _all(self)}


def metrics(
    survival: np.ndarray,
    labels: np.ndarray,
    bins: int = BINS,
    *,
    proposed: np.ndarray | None = None,
) -> Metrics:
    """Compares predicted prefix survival with what happened.

    Args:
      survival: float[S, N]. Of `survival`; entries not proposed are not read.
      labels: float[S, N]. 1 where all drafts up to the position were accepted.
      bins: of the calibration error.
      proposed: bool[S, N]; None: every round proposed every position.

    Raises:
      ValueError: arrays of other shapes, values outside [0, 1].
    """
    survival, labels = np.asarray(survival), np.asarray(labels)
    require(survival.ndim == 2, "survival", survival.shape, "two axes, [S, N]")
    mask = np.ones(survival.shape, bool) if proposed is None else np.asarray(proposed)
    for name, x in (("labels", labels), ("proposed", mask)):
        require(x.shape == survival.shape, name, x.shape, f"{survival.shape}")
    columns: dict[str, list[float]] = {name: [] for name in FIELDS}
    for k in range(survival.shape[1]):
        pred, label = survival[mask[:, k], k], labels[mask[:, k], k]
        columns["ece"].append(expected_calibration_error(pred, label, bins))
        columns["auc"].append(auroc(pred, label))
        columns["brier"].append(brier(pred, label))
        columns["noise"].append(calibration_noise(pred, bins))
        for name, x in (("prediction", pred), ("label", label)):
            mean = float(np.mean(x, dtype=np.float64)) if x.size else float("nan")
            columns[name].append(mean)
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    return Metrics(count=mask.sum(0), **arrays)


def summary(found: Metrics) -> dict[str, float]:
    """Means over positions, weighted by their counts.

    A position whose value is NaN is left out of that value's two sums.
    """
    out = {}
    for name in FIELDS:
        values = getattr(found, name)
        counts = np.where(np.isnan(values), 0, found.count)
        total = counts.sum()
        mean = np.nansum(values * counts) / total if total else float("nan")
        out[name] = float(mean)
    return out


def _all(found: Metrics) -> dict[str, float | None]:
    values = summary(found)
    return dict(zip(values, _plain(np.asarray(list(values.values()))), strict=True))


def _plain(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(x) else float(x) for x in values]
