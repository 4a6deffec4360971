"""How far predicted chances are from what happened, at one drafted position.

Predictions are chances in [0, 1]; labels are outcomes 0 or 1, or chances of them
where those are known. All sums are in float64.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dspark_jax.config import require

BINS = 15
AUROC_BINS = 1000
# Predictions are kept this far from 0 and 1.
MARGIN = 1e-8


@dataclasses.dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability diagram: what is predicted against what happened, by bin.

    Attributes:
      count: float64[B]. Predictions in the bin (their weights added up).
      prediction: float64[B]. Their mean; NaN in an empty bin.
      label: float64[B]. The mean label there; NaN in an empty bin.
    """

    count: np.ndarray
    prediction: np.ndarray
    label: np.ndarray


def reliability(
    pred: np.ndarray,
    label: np.ndarray,
    bins: int = BINS,
    weights: np.ndarray | None = None,
) -> Reliability:
    """Means by equal bins of [0, 1].

    Bins are closed on the left, [b/B, (b+1)/B), and the last one on both sides.

    Args:
      pred: float[S].
      label: float[S] in [0, 1].
      bins: B.
      weights: float[S] >= 0; None counts every entry once.

    Raises:
      ValueError: arrays of other shapes, values outside [0, 1], no bin.
    """
    pred, label, weights = _checked(pred, label, weights)
    require(bins >= 1, "bins", bins, ">= 1")
    pred = np.clip(pred, MARGIN, 1 - MARGIN)
    index = _index(pred, bins)
    count = np.bincount(index, weights, bins)
    filled = np.where(count > 0, count, np.nan)
    return Reliability(
        count=count,
        prediction=np.bincount(index, weights * pred, bins) / filled,
        label=np.bincount(index, weights * label, bins) / filled,
    )


def expected_calibration_error(
    pred: np.ndarray,
    label: np.ndarray,
    bins: int = BINS,
    weights: np.ndarray | None = None,
) -> float:
    """Mean distance of prediction and label over the bins of `reliability`.

    ECE = sum_b n_b |mean prediction - mean label| / N. NaN without an entry.

    Args:
      pred: float[S]; kept 1e-8 away from 0 and 1.
      label: float[S].
      bins: B.
      weights: float[S], see `reliability`.
    """
    found = reliability(pred, label, bins, weights)
    total = found.count.sum()
    if total == 0:
        return float("nan")
    gap = np.abs(found.prediction - found.label)
    return float(np.nansum(found.count * gap) / total)


def calibration_noise(pred: np.ndarray, bins: int = BINS) -> float:
    """The calibration error that chance alone gives: of right predictions, on average.

    With right predictions a bin's sum of 0/1 labels is normal around the sum of its
    predictions, with variance sum p (1 - p); its distance from there is
    sqrt(2/pi) standard deviations on average. An error near this says nothing.

    Args:
      pred: float[S].
      bins: B.
    """
    pred, _, _ = _checked(pred, pred, None)
    if not pred.size:
        return float("nan")
    variance = np.bincount(_index(pred, bins), pred * (1 - pred), bins)
    return float(np.sqrt(2 / np.pi * variance).sum() / pred.size)


def brier(pred: np.ndarray, label: np.ndarray) -> float:
    """Mean squared distance of prediction and label; NaN without an entry."""
    pred, label, _ = _checked(pred, label, None)
    if not pred.size:
        return float("nan")
    return float(np.mean((pred - label) ** 2))


def auroc(pred: np.ndarray, label: np.ndarray) -> float:
    """Area under the ROC curve, from histograms of 1000 bins.

    The chance that an accepted draft was predicted higher than a rejected one;
    two in the same bin count one half. NaN if one class is empty. A label between
    0 and 1 counts for both classes, by its share.

    Args:
      pred: float[S].
      label: float[S].
    """
    pred, label, _ = _checked(pred, label, None)
    index = _index(pred, AUROC_BINS)
    accepted = np.bincount(index, label, AUROC_BINS)
    rejected = np.bincount(index, 1 - label, AUROC_BINS)
    pairs = accepted.sum() * rejected.sum()
    if pairs == 0:
        return float("nan")
    below = np.cumsum(rejected) - rejected
    return float((accepted * (below + 0.5 * rejected)).sum() / pairs)


def _index(pred: np.ndarray, bins: int) -> np.ndarray:
    return np.minimum(np.floor(pred * bins).astype(np.int64), bins - 1)


def _checked(
    pred: np.ndarray, label: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pred, label = np.asarray(pred, np.float64), np.asarray(label, np.float64)
    weights = np.ones(pred.shape) if weights is None else np.asarray(weights)
    weights = weights.astype(np.float64)
    require(pred.ndim == 1, "pred", pred.shape, "one axis")
    for name, x in (("label", label), ("weights", weights)):
        require(
            x.shape == pred.shape, name, x.shape, f"the shape of `pred` {pred.shape}"
        )
    for name, x in (("pred", pred), ("label", label)):
        ok = bool(np.all((x >= 0) & (x <= 1)))
        require(ok, name, x[~((x >= 0) & (x <= 1))][:3], "values in [0, 1]")
    ok = bool(np.all(np.isfinite(weights) & (weights >= 0)))
    require(ok, "weights", weights, "finite numbers >= 0")
    return pred, label, weights
