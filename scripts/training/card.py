"""The model card of a trained draft, from its figures."""

from __future__ import annotations

import pathlib
from typing import Any

TEMPLATE = pathlib.Path(__file__).with_name("card.md")


def write_card(facts: dict[str, Any], history: list[dict[str, Any]]) -> str:
    """The card; the last entry of `history` is the final measurement."""
    final = history[-1]
    rows = [
        f"| {h['minutes']:.0f} | {h['anchors_seen']} | {h['sequences']} "
        f"| {h['greedy_tau']:.2f} | {h['expected_tau']:.2f} |"
        for h in history
    ]
    listed = lambda values: ", ".join(f"{x:.3f}" for x in values)  # noqa: E731
    return TEMPLATE.read_text().format(
        **facts,
        anchors=final["anchors_seen"],
        steps=final["step"],
        minutes=final["minutes"],
        sequences=final["sequences"],
        greedy=final["greedy_tau"],
        greedy_anchors=final["greedy_tau_anchors"],
        greedy_conditional=listed(final["greedy_conditional"]),
        expected=final["expected_tau"],
        acceptance=listed(final["acceptance"]),
        confidence=final["confidence_error"],
        progress="\n".join(rows),
    )
