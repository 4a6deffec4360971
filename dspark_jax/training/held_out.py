"""Figures of a draft in training, on text it is not trained on.

Teacher-forced, so cheap: nothing is generated. The figures that count are those of
`dspark-jax eval`, which decodes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from dspark_jax.config_draft import DraftConfig
from dspark_jax.models.params import Tree
from dspark_jax.training.corpus import Corpus
from dspark_jax.training.settings import TrainConfig
from dspark_jax.training.step import evaluate_step


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Figures of some sequences.

    Attributes:
      greedy_length: accepted length with bonus on text of temperature 0, following
        rounds through it; None without such text.
      greedy_conditional: by position, matches among rows whose block matched so far.
      expected_length: mean over anchors of 1 + sum over k of prod over i <= k of A_i,
        A = sum of min(p, q) at temperature 1, on text of temperature 1; None likewise.
      acceptance: mean A by position, there.
      confidence_error: mean |c - A| there; None without the head.
      anchors: how many, greedy and at temperature 1.
    """

    greedy_length: float | None
    greedy_conditional: list[float]
    expected_length: float | None
    acceptance: list[float]
    confidence_error: float | None
    anchors: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


def held_out_figures(
    config: DraftConfig,
    train: TrainConfig,
    params: Tree,
    frozen: Tree,
    corpus: Corpus,
    count: int | None = None,
) -> HeldOut:
    """Measures a draft on the first `count` held-out sequences; None: all."""
    rounds = emitted = 0
    good, overlaps, errors = [], [], []
    for sequence in corpus.held_out[:count]:
        batch = corpus.every_anchor(int(sequence))
        kept = int(batch["keep"].sum())
        got = jax.device_get(evaluate_step(config, train, params, frozen, batch))
        got = {name: x[0, :kept] for name, x in got.items()}
        full = got["supervised"].all(axis=-1)
        heat = corpus.text.temperature[sequence]
        if heat == 0:
            prefix = np.cumprod(got["match"], axis=-1)
            good.append(prefix[full])
            walked = _walk(batch["anchors"][0, :kept], prefix.sum(axis=-1), full)
            rounds, emitted = rounds + walked[0], emitted + walked[1]
        elif heat == 1:
            accept = got["accept"][full]
            overlaps.append(accept)
            if "confidence" in got:
                guess = 1.0 / (1.0 + np.exp(-got["confidence"][full]))
                errors.append(np.abs(guess - accept))
    matched = np.concatenate(good) if good else np.zeros((0, config.gamma))
    accept = np.concatenate(overlaps) if overlaps else np.zeros((0, config.gamma))
    before = np.concatenate([np.ones((len(matched), 1)), matched[:, :-1]], axis=1)
    lengths = 1.0 + np.cumprod(accept, axis=-1).sum(axis=-1)
    return HeldOut(
        greedy_length=emitted / rounds if rounds else None,
        greedy_conditional=(matched.sum(0) / np.maximum(before.sum(0), 1)).tolist(),
        expected_length=float(lengths.mean()) if len(lengths) else None,
        acceptance=accept.mean(axis=0).tolist() if len(accept) else [],
        confidence_error=float(np.concatenate(errors).mean()) if errors else None,
        anchors=(len(matched), len(accept)),
    )


def _walk(
    anchors: np.ndarray, accepted: np.ndarray, full: np.ndarray
) -> tuple[int, int]:
    """(rounds, tokens) of decoding along a text, from its first anchor on."""
    by_anchor = {
        int(at): int(n)
        for at, n, whole in zip(anchors, accepted, full, strict=True)
        if whole
    }
    at, rounds, emitted = int(anchors[0]), 0, 0
    while at in by_anchor:
        rounds, emitted = rounds + 1, emitted + by_anchor[at] + 1
        at += by_anchor[at] + 1
    return rounds, emitted
