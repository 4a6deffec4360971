"""Training text with what the target says about it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DecoderConfig
from dspark_jax.models.params import Tree
from dspark_jax.training import target_pass
from dspark_jax.training.anchors import sample_anchors
from dspark_jax.training.batches import step_anchors, step_sequences, usable
from dspark_jax.training.features import FeatureStore
from dspark_jax.training.sequences import Sequences, loss_mask


class Corpus:
    """Sequences as batches; the last `held_out` ones are never trained on.

    What the target says about a sequence is read from the store, or computed and put
    there.
    """

    def __init__(
        self,
        text: Sequences,
        target: DecoderConfig,
        target_params: Tree,
        taps: tuple[int, ...],
        top: int,
        store: FeatureStore | None,
        held_out: int,
        chunk: int,
    ):
        """Checks the text; passes of the target have `chunk` sequences.

        All of them, as products of other shapes have other bits, and training from
        the store would not equal training without.

        Raises:
          ValueError: ids that the target does not have, or no usable sequence.
        """
        if text.tokens.max() >= target.vocab_size:
            raise ValueError(
                f"the text has token id {text.tokens.max()}; the target has "
                f"{target.vocab_size} ids"
            )
        self.text, self.mask = text, loss_mask(text)
        self._target, self._params = target, target_params
        self._taps, self._top, self._store = taps, top, store
        self._chunk = chunk
        self.everything = everything = usable(self.mask)
        if len(everything) <= held_out:
            raise ValueError(
                f"the text has {len(everything)} sequences with enough answer tokens "
                f"and {held_out} are held out; give more text"
            )
        self.trained = everything[: len(everything) - held_out]
        self.held_out = everything[len(everything) - held_out :]
        self.t2d: np.ndarray | None = None

    def annotate(self, sequences: np.ndarray) -> Iterator[int]:
        """Fills the store for `sequences`; yields how many were done each time."""
        if self._store is None:
            return
        missing = self._store.missing(sequences)
        for at in range(0, len(missing), self._chunk):
            rows = missing[at : at + self._chunk]
            self._store.write(rows, self._compute(rows))
            yield len(rows)

    def coverage(self) -> float:
        """Share of the held-out written tokens that the draft can propose."""
        rows = self.held_out if len(self.held_out) else self.trained
        written = self.text.tokens[rows][self.text.written[rows]]
        return 1.0 if self.t2d is None else float((self.t2d[written] >= 0).mean())

    def batch(self, seed: int, step: int, count: int, anchors: int) -> dict:
        """The batch of a step; see `step.Batch`."""
        places = step_sequences(seed, step, count, len(self.trained))
        sequences = self.trained[places]
        at, keep = step_anchors(seed, step, self.mask[sequences], anchors)
        return self.rows(sequences, at, keep)

    def every_anchor(self, sequence: int) -> dict:
        """A batch of one sequence with all its anchors."""
        rows = np.array([sequence])
        length = self.text.tokens.shape[1]
        at, keep = sample_anchors(np.random.default_rng(0), self.mask[rows], length)
        return self.rows(rows, at, keep)

    def rows(
        self, sequences: np.ndarray, anchors: np.ndarray, keep: np.ndarray
    ) -> dict:
        """A batch of given sequences and anchors."""
        values = self.annotated(sequences)
        out = {
            "tokens": self.text.tokens[sequences],
            "mask": self.mask[sequences],
            "features": values["features"],
            "anchors": anchors,
            "keep": keep,
        }
        if self._top == 0:
            return {**out, "hidden": values["hidden"]}
        ids = values["top_ids"].astype(np.int32)
        if self.t2d is not None:
            ids = self.t2d[ids]
        return {
            **out,
            "ids": ids,
            "probs": np.exp(values["top_logs"].astype(np.float32)),
        }

    def annotated(self, sequences: np.ndarray) -> dict[str, np.ndarray]:
        """The target's values of sequences, `[n, S, width]` by name."""
        store = self._store
        if store is None:
            return self._compute(sequences)
        missing = store.missing(np.unique(sequences))
        if len(missing):
            store.write(missing, self._compute(missing))
        if store.has(sequences):
            return store.read(sequences)
        return self._compute(sequences)

    def _compute(self, sequences: np.ndarray) -> dict[str, np.ndarray]:
        parts = []
        for at in range(0, len(sequences), self._chunk):
            rows = sequences[at : at + self._chunk]
            tokens = jnp.asarray(self.text.tokens[np.resize(rows, self._chunk)])
            values = target_pass.annotate(
                self._target, self._params, tokens, self._taps, self._top
            )
            parts.append({k: x[: len(rows)] for k, x in jax.device_get(values).items()})
        return {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
