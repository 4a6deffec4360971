"""Reliability diagrams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.plotting import figure_class, save_figure
from dspark_jax.scheduling.reliability import (
    BINS,
    expected_calibration_error,
    reliability,
)

PANEL_INCHES = 2.1


def draw_reliability(
    file: str | Path,
    survival: np.ndarray,
    labels: np.ndarray,
    bins: int = BINS,
    *,
    proposed: np.ndarray | None = None,
    title: str = "",
) -> None:
    """Draws predicted against actual survival, a panel for each position.

    A point is a bin: its mean prediction and how often the prefix stood. Right
    predictions lie on the diagonal; below it the draft is too sure of itself. Bars
    show where the predictions are, as shares of the rounds. A bar behind a point spans
    one standard error of the outcomes in the bin.

    Args:
      file: ends in .svg or .png.
      survival: float[S, N].
      labels: float[S, N].
      bins: of the diagram.
      proposed: bool[S, N], see `metrics`.
      title: above the panels.

    Raises:
      ValueError: matplotlib is missing.
    """
    figures = figure_class()
    positions = survival.shape[1]
    mask = np.ones(survival.shape, bool) if proposed is None else proposed
    figure = figures(figsize=(PANEL_INCHES * positions, PANEL_INCHES + 0.5))
    panels = figure.subplots(1, positions, sharex=True, sharey=True, squeeze=False)
    for k, axes in enumerate(panels[0]):
        pred, label = survival[mask[:, k], k], labels[mask[:, k], k]
        _panel(axes, pred, label, bins)
        error = expected_calibration_error(pred, label, bins)
        axes.set_title(f"draft {k + 1}, ECE {error:.1%}", fontsize=8)
        axes.set_xlabel("predicted", fontsize=8)
    panels[0, 0].set_ylabel("stood", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    save_figure(figure, file)


def _panel(axes: Any, pred: np.ndarray, label: np.ndarray, bins: int) -> None:
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.8)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=[0, 0.5, 1])
    axes.set_yticks([0, 0.5, 1])
    axes.tick_params(labelsize=7)
    found = reliability(pred, label, bins)
    if not pred.size:
        return
    left = np.arange(bins) / bins
    shares = found.count / pred.size
    axes.bar(left, shares, 1 / bins, align="edge", color="0.88")
    there = found.count > 0
    spread = np.sqrt(found.label * (1 - found.label) / np.maximum(found.count, 1))
    axes.errorbar(
        found.prediction[there],
        found.label[there],
        spread[there],
        fmt="o-",
        markersize=3,
        linewidth=0.9,
        elinewidth=0.7,
        color="C0",
    )
