"""Learning curves of a run, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_jax.plotting import figure_class, save_figure


def draw(lines: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draws loss parts and held-out lengths over steps to an image file.

    Args:
      lines: metrics of a run, in order.
      path: ending in what matplotlib can write, `.png` for example.

    Raises:
      ValueError: no matplotlib, or nothing to draw.
    """
    figures = figure_class()
    steps = [line for line in lines if "loss" in line]
    held = [line for line in lines if "held_out" in line]
    if not steps:
        raise ValueError("the run has no metrics yet; train first")
    figure = figures(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in ("loss", "ce", "l1", "confidence"):
        points = [(line["step"], line[name]) for line in steps if name in line]
        if points:
            left.plot(*zip(*points, strict=True), label=name)
    left.set_xlabel("step")
    left.set_title("training loss and its terms")
    left.legend()
    for name, label in (
        ("greedy_length", "greedy"),
        ("expected_length", "temperature 1"),
    ):
        points = [
            (line["step"], line["held_out"][name])
            for line in held
            if line["held_out"].get(name) is not None
        ]
        if points:
            right.plot(*zip(*points, strict=True), marker="o", label=label)
    right.set_xlabel("step")
    right.set_title("accepted length on held-out text")
    if held:
        right.legend()
    save_figure(figure, path)
