"""Pictures of an evaluation: acceptance, thresholds, predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.plotting import figure_class, save_figure


def save_plots(report: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Draws a report into PNG files.

    Args:
      report: `Evaluation.to_json()`.
      folder: made if it is missing. Files: `acceptance`, `sweep`, `survival`; the last
        two only of a draft with a confidence head.

    Returns:
      The files.

    Raises:
      ValueError: matplotlib is missing.
    """
    figures = figure_class()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    entries = report["temperatures"]
    pictures: dict[str, Callable[[Any, Sequence[Mapping[str, Any]]], None]] = {
        "acceptance": _acceptance
    }
    if any(one["overall"]["sweep"] for one in entries):
        pictures |= {"sweep": _sweep, "survival": _survival}
    files = []
    for name, draw in pictures.items():
        figure = figures(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, entries)
        axes.set_title(f"{report['model']}, {report['draft_length']} drafts")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        files.append(folder / f"{name}.png")
        save_figure(figure, files[-1], dpi=150)
    return files


def _acceptance(axes: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    for color, one in enumerate(entries):
        at = f"T = {one['temperature']:g}"
        for name, style in (("conditional", "o-"), ("survival", "s--")):
            _by_position(
                axes, one["overall"][name], f"C{color}{style}", f"{name}, {at}"
            )
        overlap = one["overall"]["overlap"]
        _by_position(axes, overlap, f"C{color}x:", f"mean overlap, {at}")
    _positions(axes, "share of drafts accepted")


def _survival(axes: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    for color, one in enumerate(entries):
        at, figures = f"T = {one['temperature']:g}", one["overall"]
        _by_position(axes, figures["survival"], f"C{color}s-", f"measured, {at}")
        _by_position(axes, figures["predicted"], f"C{color}o--", f"predicted, {at}")
    _positions(axes, "chance that the prefix stands")


def _sweep(axes: Any, entries: Sequence[Mapping[str, Any]]) -> None:
    for color, one in enumerate(entries):
        points = [p for p in one["overall"]["sweep"] if p["drafts"] is not None]
        rows = [p["verified_rows"] for p in points]
        tokens = [p["accepted_length"] for p in points]
        axes.plot(rows, tokens, f"C{color}o-", label=f"T = {one['temperature']:g}")
        last = float("inf")
        for point, x, y in zip(points, rows, tokens, strict=True):
            # Thresholds that cut the same would be written over each other.
            if abs(last - x) > 0.1:
                label, last = f"{point['threshold']:g}", x
                away = dict(xytext=(4, -8), textcoords="offset points")
                axes.annotate(label, (x, y), fontsize="x-small", **away)
    axes.set_xlabel("rows verified a round (numbers: threshold)")
    axes.set_ylabel("tokens a round")


def _by_position(
    axes: Any, values: Sequence[float | None], style: str, label: str
) -> None:
    shown = [(k, v) for k, v in enumerate(values, 1) if v is not None]
    if shown:
        axes.plot(*zip(*shown, strict=True), style, label=label)


def _positions(axes: Any, title: str) -> None:
    axes.set_ylim(0, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("position of the draft")
    axes.set_ylabel(title)
