"""Loss and optimiser step of a draft on a batch of annotated sequences."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from dspark_jax.config_draft import DraftConfig
from dspark_jax.models import dense
from dspark_jax.models.draft import backbone
from dspark_jax.models.params import Tree, flatten, unflatten
from dspark_jax.training import losses
from dspark_jax.training.anchors import block_labels
from dspark_jax.training.forward import (
    BlockRows,
    block_rows,
    confidence_logits,
    teacher_forced,
)
from dspark_jax.training.head import LANES, head_loss
from dspark_jax.training.optimiser import TrainState, update
from dspark_jax.training.settings import TrainConfig

# tokens int32[B, S], mask bool[B, S], features bfloat16[B, S, m * H],
# anchors int32[B, A], keep bool[B, A], and of the token after each position
# either ids int32[B, S, K] (rows of the draft's vocabulary, -1 outside) with
# probs float32[B, S, K], or hidden bfloat16[B, S, H], the target's final rows.
Batch = Mapping[str, jax.Array]


def compute_params(params: Tree, frozen: Tree, dtype: str) -> Tree:
    """Weights as the forward takes them: matrices in `dtype`, frozen tables added."""
    flat = {
        path: leaf
        if "norm" in path[-2] or path[0] == "confidence"
        else leaf.astype(dtype)
        for path, leaf in flatten(params).items()
    }
    tables = {name: frozen[name] for name in ("lm_head", "d2t") if name in frozen}
    return {**unflatten(flat), **tables}


def can_fuse(config: DraftConfig, train: TrainConfig) -> bool:
    """Whether `head_loss` says the same as the plain terms."""
    decoder = backbone.decoder_of(config)
    plain = decoder.logit_softcap is None and decoder.valid_vocab is None
    return (
        plain
        and train.top > 0
        and train.soft_labels
        and (config.head_rows % LANES == 0)
    )


def draft_loss(
    config: DraftConfig,
    train: TrainConfig,
    fused: bool,
    params: Tree,
    frozen: Tree,
    batch: Batch,
    ce: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and its parts; see `losses`.

    Args:
      config: the draft.
      train: weights of the terms, kind of supervision.
      fused: compute head and losses in one pass; only where `can_fuse`.
      params: float32 trained weights.
      frozen: embed, lm_head, and where they apply d2t, t2d, target_head; `scale`
        float32[m * H] divides the features, so that all taps have the same size.
      batch: see `Batch`.
      ce: float32. Weight of the cross-entropy.

    Returns:
      (loss, {"ce", "l1", "confidence", "accept"}), all scalars.
    """
    labels, supervised = _labels(config, batch)
    cast = compute_params(params, frozen, train.dtype)
    rows = _rows(config, cast, frozen, batch, labels)
    weights = losses.row_weights(supervised, train.loss.decay)
    share = (weights / (jnp.sum(weights) + losses.EPSILON)).reshape(-1)
    if fused:
        ids, probs = _aligned(batch, labels, "ids"), _aligned(batch, labels, "probs")
        w2 = params["markov"]["w2"]["weight"] if config.markov_rank else None
        latent = rows.latent
        if latent is None or w2 is None:
            latent = jnp.zeros((len(rows.hidden), 0), jnp.float32)
            w2 = jnp.zeros((config.head_rows, 0), jnp.float32)
        loss, row_ce, row_l1 = head_loss(
            rows.hidden,
            latent,
            frozen["lm_head"]["weight"].astype(train.dtype),
            w2,
            ids.reshape(-1, ids.shape[-1]),
            probs.reshape(-1, ids.shape[-1]),
            ce * share,
            jnp.float32(train.loss.l1) * share,
        )
        accept = jax.lax.stop_gradient(jnp.clip(1.0 - 0.5 * row_l1, 0.0, 1.0))
    else:
        terms = _terms(config, train, cast, frozen, batch, labels, rows)
        row_ce, row_l1, accept = (
            _only(x.reshape(-1), share) for x in (terms.ce, terms.l1, terms.accept)
        )
        loss = jnp.sum(share * (ce * row_ce + jnp.float32(train.loss.l1) * row_l1))
    parts = {
        "ce": jnp.sum(share * row_ce),
        "l1": jnp.sum(share * row_l1),
        "accept": jnp.sum(share * accept),
    }
    guess = confidence_logits(config, cast, rows, train.loss.detach_confidence)
    if guess is not None:
        terms = _only(losses.confidence_terms(guess, accept), share)
        parts["confidence"] = jnp.sum(share * terms)
        loss = loss + train.loss.confidence * parts["confidence"]
    return loss, parts


@functools.partial(
    jax.jit, static_argnames=("config", "train", "fused"), donate_argnames=("state",)
)
def train_step(
    config: DraftConfig,
    train: TrainConfig,
    fused: bool,
    state: TrainState,
    frozen: Tree,
    batch: Batch,
    rate: jax.Array,
    ce: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One gradient step with learning rate `rate`; arguments as `draft_loss`."""

    def loss_of(params: Tree):
        return draft_loss(config, train, fused, params, frozen, batch, ce)

    (loss, parts), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    squares = [jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)]
    parts = {**parts, "loss": loss, "norm": jnp.sqrt(sum(squares))}
    return update(train, state, grads, rate), parts


@functools.partial(jax.jit, static_argnames=("config", "train"))
def evaluate_step(
    config: DraftConfig, train: TrainConfig, params: Tree, frozen: Tree, batch: Batch
) -> dict[str, jax.Array]:
    """Per anchor and row: greedy match, acceptance, confidence, supervision.

    Given the true tokens before it, a greedy row matches exactly when the free
    running draft would be accepted there, because an accepted prefix is true.
    """
    labels, supervised = _labels(config, batch)
    cast = compute_params(params, frozen, train.dtype)
    outputs = teacher_forced(
        config,
        cast,
        frozen,
        batch["tokens"],
        _scaled(frozen, batch),
        batch["anchors"],
        labels,
        True,
    )
    terms = _terms_of(config, train, frozen, batch, labels, outputs.logits)
    best = jnp.argmax(outputs.logits, axis=-1)
    if "d2t" in frozen:
        best = jnp.take(frozen["d2t"], best)
    out = {
        "match": (best == labels) & supervised,
        "accept": terms.accept,
        "supervised": supervised,
    }
    if outputs.confidence is not None:
        out["confidence"] = outputs.confidence
    return out


def _labels(config: DraftConfig, batch: Batch) -> tuple[jax.Array, jax.Array]:
    return block_labels(
        batch["tokens"], batch["mask"], batch["anchors"], batch["keep"], config.gamma
    )


def _scaled(frozen: Tree, batch: Batch) -> jax.Array:
    return batch["features"].astype(jnp.float32) / frozen["scale"][None, None]


def _rows(
    config: DraftConfig, cast: Tree, frozen: Tree, batch: Batch, labels: jax.Array
) -> BlockRows:
    features = _scaled(frozen, batch)
    return block_rows(
        config, cast, frozen, batch["tokens"], features, batch["anchors"], labels
    )


def _terms(
    config: DraftConfig,
    train: TrainConfig,
    cast: Tree,
    frozen: Tree,
    batch: Batch,
    labels: jax.Array,
    rows: BlockRows,
) -> losses.RowTerms:
    logits = backbone.corrected_logits(config, cast, frozen, rows.hidden, rows.latent)
    logits = logits.reshape(*labels.shape, -1)
    return _terms_of(config, train, frozen, batch, labels, logits)


def _terms_of(
    config: DraftConfig,
    train: TrainConfig,
    frozen: Tree,
    batch: Batch,
    labels: jax.Array,
    logits: jax.Array,
) -> losses.RowTerms:
    """Terms of every row against what the batch holds of the target's law."""
    own = labels
    if "t2d" in frozen:
        own = jnp.take(frozen["t2d"], labels)
    wanted = None if train.soft_labels else own
    if train.top:
        ids, probs = _aligned(batch, labels, "ids"), _aligned(batch, labels, "probs")
        return losses.sparse_terms(logits, ids, probs, wanted)
    hidden = _aligned(batch, labels, "hidden").astype(jnp.float32)
    flat = hidden.reshape(-1, hidden.shape[-1])
    table = frozen["target_head"]["weight"]
    probs = jax.nn.softmax(
        dense.head_logits(backbone.decoder_of(config), flat, table), axis=-1
    )
    if "d2t" in frozen:
        probs = jnp.take(probs, frozen["d2t"], axis=1)
    return losses.dense_terms(logits, probs.reshape(*labels.shape, -1), wanted)


def _aligned(batch: Batch, labels: jax.Array, name: str) -> jax.Array:
    """`batch[name]` of the position before each label, [B, A, gamma, width]."""
    steps = jnp.arange(labels.shape[-1], dtype=jnp.int32)[None, None]
    at = jnp.minimum(batch["anchors"][:, :, None] + steps, batch["tokens"].shape[1] - 1)
    values = batch[name]
    at = at.reshape(at.shape[0], -1, 1)
    taken = jnp.take_along_axis(values, at, axis=1)
    return taken.reshape(*labels.shape, values.shape[-1])


def _only(values: jax.Array, share: jax.Array) -> jax.Array:
    """0 where a row has no weight: its value may be anything, NaN included."""
    return jnp.where(share > 0, values, 0.0)
