"""Which sequences and anchors a step sees: a function of the seed and the step.

Nothing is remembered between steps, so a resumed run draws what an uninterrupted
one would have drawn.
"""

from __future__ import annotations

import numpy as np

from dspark_jax.training.anchors import sample_anchors

# Purposes of random streams.
_ORDER, _ANCHORS = 1, 2


def usable(loss_mask: np.ndarray, fewest: int = 14) -> np.ndarray:
    """Numbers of sequences with at least `fewest` supervised tokens, int64[n].

    The bound is the published recipe's.
    """
    return np.flatnonzero(np.asarray(loss_mask).sum(axis=1) >= fewest)


def step_sequences(seed: int, step: int, batch: int, count: int) -> np.ndarray:
    """Places of a step's sequences in a list of `count`, int64[batch].

    Every pass over the list is a permutation of its own; a batch may straddle two.
    """
    at = np.arange(step * batch, (step + 1) * batch)
    out = np.empty(batch, np.int64)
    for epoch in np.unique(at // count):
        order = np.random.default_rng((seed, _ORDER, epoch)).permutation(count)
        inside = at // count == epoch
        out[inside] = order[at[inside] % count]
    return out


def step_anchors(
    seed: int, step: int, loss_mask: np.ndarray, anchors: int
) -> tuple[np.ndarray, np.ndarray]:
    """Anchors of a step's sequences; see `sample_anchors`."""
    random = np.random.default_rng((seed, _ANCHORS, step))
    return sample_anchors(random, loss_mask, anchors)


def draft_vocabulary(tokens: np.ndarray, size: int, vocab: int) -> np.ndarray:
    """The `size` ids that occur most often, ascending, int32[size].

    Args:
      tokens: ids that the target wrote, any shape.
      size: rows of the draft's vocabulary.
      vocab: ids of the target.
    """
    counts = np.bincount(np.asarray(tokens).reshape(-1), minlength=vocab)
    best = np.argsort(-counts.astype(np.int64), kind="stable")[:size]
    return np.sort(best).astype(np.int32)
