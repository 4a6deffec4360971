"""Anchors of a training sequence, and what each block of one is taught.

A block starts at an anchor: a position whose own token and the next one are
both supervised. Row j of a block predicts the token 1 + j after the anchor, as
long as every token up to it is supervised (DSpark paper, section 3.4).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def sample_anchors(
    random: np.random.Generator, loss_mask: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws anchors without replacement.

    Args:
      random: source of randomness.
      loss_mask: bool[B, S]. Supervised tokens.
      count: A, anchors per sequence.

    Returns:
      (positions int32[B, A] ascending, keep bool[B, A]). A sequence with fewer
      candidates than A is filled up with position 0, keep False.
    """
    mask = np.asarray(loss_mask, bool)
    positions = np.zeros((len(mask), count), np.int32)
    keep = np.zeros((len(mask), count), bool)
    for row, allowed in enumerate(mask[:, :-1] & mask[:, 1:]):
        candidates = np.flatnonzero(allowed)
        n = min(count, len(candidates))
        positions[row, :n] = np.sort(random.permutation(candidates)[:n])
        keep[row, :n] = True
    return positions, keep


def block_labels(
    tokens: jax.Array,
    loss_mask: jax.Array,
    positions: jax.Array,
    keep: jax.Array,
    gamma: int,
) -> tuple[jax.Array, jax.Array]:
    """Labels of every block and which of them are supervised.

    Args:
      tokens: int32[B, S].
      loss_mask: bool[B, S].
      positions: int32[B, A]. Anchors.
      keep: bool[B, A]. False for dummies.
      gamma: drafted tokens per block.

    Returns:
      (labels int32[B, A, gamma], supervised bool[B, A, gamma]). A row is
      supervised while it and all earlier rows of its block have a supervised
      token; labels past the sequence repeat its last token and never count.
    """
    length = tokens.shape[1]
    steps = jnp.arange(1, gamma + 1, dtype=jnp.int32)[None, None]
    at = positions[:, :, None] + steps
    inside = at < length
    at = jnp.minimum(at, length - 1).reshape(tokens.shape[0], -1)
    shape = (*positions.shape, gamma)
    labels = jnp.take_along_axis(tokens, at, axis=1).reshape(shape)
    wanted = jnp.take_along_axis(loss_mask, at, axis=1).reshape(shape)
    good = (inside & wanted & keep[:, :, None]).astype(jnp.int32)
    return labels, jnp.cumprod(good, axis=-1).astype(bool)


def previous_tokens(anchors: jax.Array, labels: jax.Array) -> jax.Array:
    """Teacher-forced previous token of each row, int32[B, A, gamma]."""
    return jnp.concatenate([anchors[:, :, None], labels[:, :, :-1]], axis=-1)
