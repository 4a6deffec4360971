"""Where a draft's weights start: the target's last layers, a bigram Markov head."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dspark_jax.config import DraftConfig
from dspark_jax.models.draft import backbone
from dspark_jax.models.params import Tree, flatten, layer_at, random_params, unflatten

logger = logging.getLogger(__name__)


def initial_params(
    config: DraftConfig, target: Tree, scale: np.ndarray, seed: int
) -> Tree:
    """Float32 weights: layers copied from the target's last ones.

    `fc` starts as the last tap plus small noise, so that context keys and
    values are nearly those of the target's last layer. It reads features divided
    by `scale` float32[m * H].
    """
    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
        for path, leaf in flatten(backbone.abstract_draft_params(config)).items()
        if path != ("d2t",)
    }
    params = random_params(unflatten(shapes), jax.random.key(seed))
    flat = flatten(params)
    last = config.num_target_layers
    count = config.backbone.num_layers
    source = [
        flatten(layer_at(target["layers"]["full"], last - count + i))
        for i in range(count)
    ]
    for path in source[0]:
        stacked = jnp.stack([layer[path].astype(jnp.float32) for layer in source])
        flat[("layers", "full", *path)] = stacked
    h = config.backbone.hidden_size
    size = jnp.asarray(scale[-h:] / np.sqrt(np.mean(np.square(scale[-h:]))))
    fc = 0.2 * flat[("fc", "weight")]
    flat[("fc", "weight")] = fc.at[:, -h:].add(jnp.diag(size))
    flat[("hidden_norm", "weight")] = source[-1][("input_norm", "weight")].astype(
        jnp.float32
    )
    flat[("norm", "weight")] = 0.3 * target["norm"]["weight"].astype(jnp.float32)
    # About the size that the target's queries and keys have.
    for name, gain in (("q_norm", 1.5), ("k_norm", 1.3)):
        where = ("layers", "full", name, "weight")
        flat[where] = jnp.full_like(flat[where], gain)
    flat[("confidence", "weight")] = 0.1 * flat[("confidence", "weight")]
    return unflatten(flat)


def bigram_head(
    pairs: np.ndarray,
    vocab: int,
    rows: int,
    rank: int,
    seed: int,
    steps: int = 450,
    batch: int = 2048,
) -> tuple[np.ndarray, np.ndarray]:
    """W1 and W2 of a Markov head that predicts the next token on its own.

    It needs no features, so it sees all the text there is. The softmax runs over
    the next tokens of the batch, each corrected for how often it is drawn.

    Args:
      pairs: int32[N, 2]. Previous id, and row of the next one in the draft's
        vocabulary.
      vocab: rows of W1.
      rows: rows of W2.
      rank: their width.
      seed: of the initial values and the order.
      steps: optimiser steps.
      batch: pairs per step.
    """
    random = np.random.default_rng(seed)
    scale = rank**-0.5
    params = {
        "w1": jnp.asarray(random.normal(size=(vocab, rank)) * scale, jnp.float32),
        "w2": jnp.asarray(random.normal(size=(rows, rank)) * 0.1, jnp.float32),
    }
    counts = np.bincount(pairs[:, 1], minlength=rows)
    drawn = jnp.asarray(np.log((counts + 1.0) / len(pairs)), jnp.float32)
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-2, 30, steps, 1e-3)
    optimiser = optax.adam(rate, b1=0.9, b2=0.98)
    state = optimiser.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, previous, following):
        def loss_of(p):
            z = jnp.take(p["w1"], previous, axis=0)
            w = jnp.take(p["w2"], following, axis=0)
            logits = jnp.matmul(z, w.T) - jnp.take(drawn, following)[None]
            same = following[:, None] == following[None]
            other = same & ~jnp.eye(len(z), dtype=bool)
            logits = jnp.where(other, -jnp.inf, logits)
            norm = jax.nn.logsumexp(logits, axis=-1)
            return jnp.mean(norm - jnp.diagonal(logits))

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    order = random.permutation(len(pairs))
    mean = 0.0
    for i in range(steps):
        rows_ = pairs[order[i * batch % (len(pairs) - batch) :][:batch]]
        params, state, loss = step(params, state, rows_[:, 0], rows_[:, 1])
        mean = 0.98 * mean + 0.02 * float(loss)
        if i % 50 == 49:
            shown = mean / (1 - 0.98 ** (i + 1))
            logger.info("bigram step %d of %d: loss %.3f", i + 1, steps, shown)
    return np.asarray(params["w1"]), np.asarray(params["w2"])
