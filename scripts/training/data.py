"""Annotated sequences as training batches."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from dspark_jax.training.anchors import sample_anchors

ANSWER = 2


def draft_vocabulary(
    tokens: np.ndarray, role: np.ndarray, vocab: int, size: int, special: range
) -> np.ndarray:
    """The `size` ids that the model wrote most often, ascending, int32[size].

    Special ids that occur are always among them.
    """
    counts = np.bincount(tokens[role > 0], minlength=vocab).astype(np.int64)
    rank = counts.copy()
    for i in special:
        if counts[i]:
            rank[i] = counts.max() + 1
    return np.sort(np.argsort(-rank, kind="stable")[:size]).astype(np.int32)


class Annotated:
    """Sequences with target features and probabilities, read from disk.

    The annotation may still be running: `refresh` takes up what it has added.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        tokens: np.ndarray,
        role: np.ndarray,
        d2t: np.ndarray,
        vocab: int,
        held_out: int,
    ):
        """Opens the stores; the last `held_out` sequences are never trained on."""
        self.tokens = tokens.astype(np.int32)
        self.answer = role == ANSWER
        self.stores = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r")
            for name in ("features", "top_ids", "top_logs", "done")
        }
        self.t2d = np.full(vocab, -1, np.int32)
        self.t2d[d2t] = np.arange(len(d2t), dtype=np.int32)
        self.trained = len(tokens) - held_out
        self.visits = np.zeros(self.trained, np.int64)
        self.ready = np.zeros(0, np.int64)
        self.refresh()

    def refresh(self) -> None:
        """Takes up sequences that have been annotated since."""
        done = np.array(self.stores["done"][: self.trained])
        enough = self.answer[: self.trained].sum(axis=1) >= 14
        self.ready = np.flatnonzero((done == 1) & enough)

    def batch(
        self, sequences: np.ndarray, anchors: np.ndarray, keep: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Arrays of one step; see `step.draft_loss`."""
        ids = self.t2d[self.stores["top_ids"][sequences].astype(np.int64)]
        logs = self.stores["top_logs"][sequences].astype(np.float32)
        return {
            "tokens": self.tokens[sequences],
            "mask": self.answer[sequences],
            "features": self.stores["features"][sequences].view(ml_dtypes.bfloat16),
            "ids": ids,
            "probs": np.exp(logs),
            "anchors": anchors,
            "keep": keep,
        }

    def draw(
        self, random: np.random.Generator, count: int, anchors: int
    ) -> dict[str, np.ndarray]:
        """A training batch: the least visited sequences, ties at random."""
        visits = self.visits[self.ready] + random.random(len(self.ready))
        sequences = np.sort(self.ready[np.argpartition(visits, count)[:count]])
        self.visits[sequences] += 1
        positions, keep = sample_anchors(random, self.answer[sequences], anchors)
        return self.batch(sequences, positions, keep)

    def held_out(self, count: int, spare: int) -> Iterator[tuple[int, dict]]:
        """(sequence, batch) with every anchor of held-out sequences."""
        for sequence in range(self.trained, len(self.tokens)):
            if count <= 0 or not self.stores["done"][sequence]:
                continue
            count -= 1
            rows = np.array([sequence])
            positions, keep = sample_anchors(
                np.random.default_rng(0), self.answer[rows], spare
            )
            yield sequence, self.batch(rows, positions, keep)
