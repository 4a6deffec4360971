"""Losses of a draft: cross-entropy, total variation and confidence.

For a row with target law p and draft law q, both at temperature 1:

    CE   = -log q(label)
    L1   = sum over v of |p(v) - q(v)|
    A    = 1 - L1 / 2 = sum over v of min(p(v), q(v))    chance of acceptance
    conf = binary cross-entropy of the confidence logit against A

Each term is a mean over supervised rows weighted with exp(-j / decay) for row j
of a block, and the loss is their weighted sum (DSpark paper, section 3.4; the L1
there is written as a norm, without the half of a total variation).

A draft with a reduced vocabulary has q = 0 outside it. The mass that p has there
is missing: it counts into L1 in full, and a label there has no CE.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

# The reference's guard on empty denominators.
EPSILON = 1e-6


@dataclass(frozen=True)
class LossConfig:
    """Weights of the three terms and the decay over positions of a block.

    `detach_confidence` cuts the gradient between the confidence head and all
    else, so that it only learns to predict. The paper's joint loss has it off.
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    detach_confidence: bool = True


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["ce", "l1", "accept"],
    meta_fields=[],
)
@dataclass(frozen=True)
class RowTerms:
    """Terms of every row, float32[...].

    `ce` is 0 where the label is outside the draft's vocabulary. `accept` is
    detached.
    """

    ce: jax.Array
    l1: jax.Array
    accept: jax.Array


def dense_terms(
    draft_logits: jax.Array,
    target_probs: jax.Array,
    labels: jax.Array | None = None,
) -> RowTerms:
    """Terms against full target rows.

    Args:
      draft_logits: float32[..., V_draft].
      target_probs: float32[..., V_draft]. Law of the target on the draft's
        ids; sums to less than 1 where the target wants other ids.
      labels: int32[...]. Row of the label in the draft's vocabulary, -1 outside.
        None takes the cross-entropy against `target_probs` itself: its mean over
        labels drawn from the target, with less noise.
    """
    log_q = jax.nn.log_softmax(draft_logits, axis=-1)
    missing = 1.0 - jnp.sum(target_probs, axis=-1)
    l1 = jnp.sum(jnp.abs(jnp.exp(log_q) - target_probs), axis=-1)
    if labels is None:
        ce = -jnp.sum(jnp.where(target_probs > 0, target_probs * log_q, 0.0), axis=-1)
    else:
        ce = _label_ce(log_q, labels)
    return _terms(ce, l1 + jnp.maximum(missing, 0.0))


def sparse_terms(
    draft_logits: jax.Array,
    ids: jax.Array,
    probs: jax.Array,
    labels: jax.Array | None = None,
) -> RowTerms:
    """Terms against the likeliest ids of the target, the rest taken as missing.

    Equals `dense_terms` when nothing but `ids` has mass. One pass over the
    draft's row instead of several.

    Args:
      draft_logits: float32[..., V_draft].
      ids: int32[..., K]. Distinct rows of the draft's vocabulary; -1 for an id
        outside it, whose mass is missing.
      probs: float32[..., K].
      labels: int32[...]. As in `dense_terms`, None too.
    """
    inside = ids >= 0
    probs = jnp.where(inside, probs, 0.0)
    norm = jax.nn.logsumexp(draft_logits, axis=-1, keepdims=True)
    picked = jnp.take_along_axis(draft_logits, jnp.maximum(ids, 0), axis=-1)
    log_q = picked - norm
    q = jnp.where(inside, jnp.exp(log_q), 0.0)
    rest = (1.0 - jnp.sum(q, axis=-1)) + (1.0 - jnp.sum(probs, axis=-1))
    l1 = jnp.sum(jnp.abs(q - probs), axis=-1) + rest
    if labels is None:
        ce = -jnp.sum(probs * log_q, axis=-1)
    else:
        ce = _label_ce(draft_logits - norm, labels)
    return _terms(ce, l1)


def _label_ce(log_q: jax.Array, labels: jax.Array) -> jax.Array:
    at = jnp.maximum(labels, 0)[..., None]
    ce = -jnp.take_along_axis(log_q, at, axis=-1)[..., 0]
    return jnp.where(labels >= 0, ce, 0.0)


def _terms(ce: jax.Array, l1: jax.Array) -> RowTerms:
    accept = jnp.clip(1.0 - 0.5 * l1, 0.0, 1.0)
    return RowTerms(ce=ce, l1=l1, accept=jax.lax.stop_gradient(accept))


def confidence_terms(logits: jax.Array, accept: jax.Array) -> jax.Array:
    """Binary cross-entropy with logits against a chance, float32[...]."""
    return (
        jnp.maximum(logits, 0.0)
        - logits * accept
        + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    )


def row_weights(supervised: jax.Array, decay: float) -> jax.Array:
    """float32[..., gamma]: exp(-j / decay) on supervised rows, else 0."""
    j = jnp.arange(supervised.shape[-1], dtype=jnp.float32)
    weights = jnp.exp(-j / jnp.float32(decay))
    weights = weights.reshape((1,) * (supervised.ndim - 1) + (-1,))
    return supervised.astype(jnp.float32) * weights


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Mean of `values`; what carries no weight may be anything, NaN included."""
    values = jnp.where(weights > 0, values, 0.0)
    return jnp.sum(values * weights) / (jnp.sum(weights) + jnp.float32(EPSILON))


def total(
    terms: RowTerms,
    confidence: jax.Array | None,
    supervised: jax.Array,
    config: LossConfig,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and its parts.

    Args:
      terms: [..., gamma].
      confidence: float32[..., gamma] logits, or None without the head.
      supervised: bool[..., gamma].
      config: the weights.

    Returns:
      (loss, {"ce", "l1", "confidence", "accept"}), all scalars.
    """
    weights = row_weights(supervised, config.decay)
    parts = {
        "ce": weighted_mean(terms.ce, weights),
        "l1": weighted_mean(terms.l1, weights),
        "accept": weighted_mean(terms.accept, weights),
    }
    loss = config.ce * parts["ce"] + config.l1 * parts["l1"]
    if confidence is not None:
        term = confidence_terms(confidence, terms.accept)
        parts["confidence"] = weighted_mean(term, weights)
        loss = loss + config.confidence * parts["confidence"]
    return loss, parts


def expected_length(accept: jax.Array, supervised: jax.Array) -> jax.Array:
    """1 + sum over k of prod over i <= k of A_i: accepted length with bonus.

    float32[..., gamma] -> float32[...].
    """
    alive = jnp.where(supervised, accept, 0.0)
    return 1.0 + jnp.sum(jnp.cumprod(alive, axis=-1), axis=-1)
