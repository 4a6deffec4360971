"""One optimiser step of a draft on annotated sequences."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from training.head import head_loss

from dspark_jax.config import DraftConfig
from dspark_jax.models.draft import backbone
from dspark_jax.models.params import Tree, flatten, unflatten
from dspark_jax.training import losses
from dspark_jax.training.anchors import block_labels, previous_tokens
from dspark_jax.training.forward import BlockOutputs, block_hidden, teacher_forced

OPTIMISER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-8)
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "average", "optimiser", "step"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class State:
    """Float32 weights, their running average, moments and the step count."""

    params: Tree
    average: Tree
    optimiser: optax.OptState
    step: jax.Array


def fresh_state(params: Tree) -> State:
    """The state training starts from."""
    return State(
        params, jax.tree.map(jnp.copy, params), OPTIMISER.init(params), jnp.int32(0)
    )


def compute_params(params: Tree, frozen: Tree) -> Tree:
    """Weights as the forward takes them: matrices in bfloat16, frozen head added."""
    flat = {
        path: leaf
        if "norm" in path[-2] or path[0] == "confidence"
        else leaf.astype(jnp.bfloat16)
        for path, leaf in flatten(params).items()
    }
    return {**unflatten(flat), "lm_head": frozen["lm_head"], "d2t": frozen["d2t"]}


def forward(
    config: DraftConfig, params: Tree, frozen: Tree, batch: dict[str, jax.Array]
) -> tuple[BlockOutputs, losses.RowTerms, jax.Array, jax.Array]:
    """Outputs, row terms, labels and supervision of a batch.

    Args:
      config: the draft.
      params: float32 trained weights.
      frozen: {"embed", "lm_head", "d2t", "scale"}; `scale` float32[m * H]
        divides the features, so that all taps have the same size.
      batch: tokens int32[B, S], mask bool[B, S], features bfloat16[B, S, m * H],
        ids int32[B, S, K] (draft rows, -1 outside), probs float32[B, S, K] of
        the token after each position, anchors int32[B, A], keep bool[B, A].
    """
    labels, supervised = block_labels(
        batch["tokens"], batch["mask"], batch["anchors"], batch["keep"], config.gamma
    )
    features = batch["features"].astype(jnp.float32) / frozen["scale"][None, None]
    outputs = teacher_forced(
        config,
        compute_params(params, frozen),
        {"embed": frozen["embed"]},
        batch["tokens"],
        features,
        batch["anchors"],
        labels,
        True,
    )
    ids, probs = aligned(batch, labels.shape)
    terms = losses.sparse_terms(outputs.logits, ids, probs)
    return outputs, terms, labels, supervised


def fast_loss(
    config: DraftConfig,
    params: Tree,
    frozen: Tree,
    batch: dict[str, jax.Array],
    ce_weight: jax.Array,
    weights: losses.LossConfig,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss and parts as `losses.total` of `forward`, through `head_loss`.

    For a vanilla Markov head and a confidence head that reads it.
    """
    tokens, anchors = batch["tokens"], batch["anchors"]
    labels, supervised = block_labels(
        tokens, batch["mask"], anchors, batch["keep"], config.gamma
    )
    ids, probs = aligned(batch, labels.shape)
    cast = compute_params(params, frozen)
    features = batch["features"].astype(jnp.float32) / frozen["scale"][None, None]
    hidden = block_hidden(
        config, cast, {"embed": frozen["embed"]}, tokens, features, anchors
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    first = jnp.take_along_axis(tokens, anchors, axis=1)
    modules = backbone.ends(config, cast)
    embedded = modules.markov.embed(previous_tokens(first, labels).reshape(-1))
    share = losses.row_weights(supervised, weights.decay)
    share = (share / (jnp.sum(share) + losses.EPSILON)).reshape(-1)
    count = ids.shape[-1]
    loss, ce, l1 = head_loss(
        flat,
        embedded,
        frozen["lm_head"]["weight"],
        params["markov"]["w2"]["weight"],
        ids.reshape(-1, count),
        probs.reshape(-1, count),
        ce_weight * share,
        jnp.float32(weights.l1) * share,
    )
    accept = jax.lax.stop_gradient(jnp.clip(1.0 - 0.5 * l1, 0.0, 1.0))
    guess = modules.confidence(*jax.lax.stop_gradient((flat, embedded)))
    confidence = jnp.sum(share * losses.confidence_terms(guess, accept))
    parts = {
        "ce": jnp.sum(share * ce),
        "l1": jnp.sum(share * l1),
        "confidence": confidence,
        "accept": jnp.sum(share * accept),
    }
    return loss + weights.confidence * confidence, parts


def aligned(
    batch: dict[str, jax.Array], shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Target ids and probabilities of every block row, [B, A, gamma, K]."""
    steps = jnp.arange(shape[-1], dtype=jnp.int32)[None, None]
    at = jnp.minimum(batch["anchors"][:, :, None] + steps, batch["tokens"].shape[1] - 1)
    at = at.reshape(at.shape[0], -1, 1)
    shape = (*shape, batch["ids"].shape[-1])
    ids = jnp.take_along_axis(batch["ids"], at, axis=1).reshape(shape)
    return ids, jnp.take_along_axis(batch["probs"], at, axis=1).reshape(shape)


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def train_step(
    config: DraftConfig,
    state: State,
    frozen: Tree,
    batch: dict[str, jax.Array],
    rate: jax.Array,
    ce_weight: jax.Array,
) -> tuple[State, dict[str, jax.Array]]:
    """Gradient step with learning rate `rate` and CE weight `ce_weight`."""
    weights = losses.LossConfig()

    def loss_of(params: Tree):
        return fast_loss(config, params, frozen, batch, ce_weight, weights)

    (loss, parts), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    norm = optax.global_norm(grads)
    updates, optimiser = OPTIMISER.update(grads, state.optimiser)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    step = state.step + 1
    count = step.astype(jnp.float32)
    keep = jnp.minimum(0.997, (1.0 + count) / (10.0 + count))
    average = jax.tree.map(
        lambda a, p: a + (1.0 - keep) * (p - a), state.average, params
    )
    parts = {**parts, "loss": loss, "norm": norm}
    return State(params, average, optimiser, step), parts


@functools.partial(jax.jit, static_argnames=("config",))
def evaluate_step(
    config: DraftConfig, params: Tree, frozen: Tree, batch: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Per anchor and row: greedy match, acceptance, confidence, supervision.

    Given the true tokens before it, a greedy row matches exactly when the free
    running draft would be accepted there, because an accepted prefix is true.
    """
    outputs, terms, labels, supervised = forward(config, params, frozen, batch)
    if outputs.confidence is None:
        raise ValueError("this evaluation needs a draft with a confidence head")
    best = jnp.take(frozen["d2t"], jnp.argmax(outputs.logits, axis=-1))
    return {
        "match": (best == labels) & supervised,
        "accept": terms.accept,
        "confidence": outputs.confidence,
        "supervised": supervised,
    }


def held_out_figures(config, params, frozen, data, temperatures, count=64):
    """Figures on held-out sequences, by temperature of their text.

    `greedy_tau` follows rounds through texts of temperature 0; `expected_tau`
    is the mean over anchors of 1 + sum of products of acceptance on texts of
    temperature 1. Conditional acceptances are per position.
    """
    rounds = emitted = 0
    lengths, hits, chances = [], [], []
    error = []
    for sequence, batch in data.held_out(count, 256):
        kept = int(batch["keep"].sum())
        if kept == 0:
            continue
        got = jax.device_get(evaluate_step(config, params, frozen, batch))
        got = {name: x[0, :kept] for name, x in got.items()}
        anchors, supervised = batch["anchors"][0, :kept], got["supervised"]
        if temperatures[sequence] == 0:
            good = np.cumprod(got["match"], axis=-1)
            accepted = dict(zip(anchors.tolist(), good.sum(-1), strict=True))
            full = supervised.all(-1)
            hits.append((good[full], supervised[full]))
            at = anchors[0]
            whole = dict(zip(anchors.tolist(), full, strict=True))
            while at in accepted and whole[at]:
                rounds, emitted = rounds + 1, emitted + accepted[at] + 1
                at = at + accepted[at] + 1
        elif temperatures[sequence] == 1:
            full = supervised.all(-1)
            accept = got["accept"][full]
            lengths.append(1 + np.cumprod(accept, axis=-1).sum(-1))
            chances.append(accept)
            c = 1 / (1 + np.exp(-got["confidence"][full]))
            error.append(np.abs(c - accept))
    good = np.concatenate([g for g, _ in hits])
    before = np.concatenate([np.ones((len(good), 1)), good[:, :-1]], axis=1)
    return {
        "greedy_tau": float(emitted / max(rounds, 1)),
        "greedy_tau_anchors": float(1 + good.sum(-1).mean()),
        "greedy_conditional": (good.sum(0) / np.maximum(before.sum(0), 1)).tolist(),
        "expected_tau": float(np.concatenate(lengths).mean()),
        "acceptance": np.concatenate(chances).mean(0).tolist(),
        "confidence_error": float(np.concatenate(error).mean()),
        "anchors": [len(good), sum(len(x) for x in lengths)],
    }
