"""A Markov head trained on bigrams: a start that needs no target."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax

logger = logging.getLogger(__name__)

BATCH = 2048


def bigrams(
    tokens: np.ndarray, written: np.ndarray, t2d: np.ndarray | None
) -> np.ndarray:
    """Pairs (id, row of the next token in the draft's vocabulary), int32[N, 2].

    Args:
      tokens: int32[N, S].
      written: bool[N, S]. Tokens that the target wrote; only they count as next.
      t2d: int32[V]. Rows of the draft's vocabulary, -1 outside; None: all ids.
    """
    following = tokens[:, 1:][written[:, 1:]]
    if t2d is not None:
        following = t2d[following]
    pairs = np.stack([tokens[:, :-1][written[:, 1:]], following], axis=1)
    return pairs[following >= 0].astype(np.int32)


def bigram_head(
    pairs: np.ndarray, vocab: int, rows: int, rank: int, seed: int, steps: int
) -> tuple[jax.Array, jax.Array]:
    """W1 float32[vocab, rank] and W2 float32[rows, rank] that predict by themselves.

    The softmax runs over the next tokens of the batch, each corrected for how often
    it is drawn.

    Args:
      pairs: from `bigrams`.
      vocab: ids of the target.
      rows: of the draft's vocabulary.
      rank: width of both.
      seed: of the initial values and the order.
      steps: optimiser steps.

    Raises:
      ValueError: too little text for one batch.
    """
    batch = min(BATCH, len(pairs) // 2)
    if batch < 2:
        raise ValueError(f"the text has {len(pairs)} bigrams; too few to train on")
    random = np.random.default_rng(seed)
    params = {
        "w1": jnp.asarray(random.normal(size=(vocab, rank)) * rank**-0.5, jnp.float32),
        "w2": jnp.asarray(random.normal(size=(rows, rank)) * 0.1, jnp.float32),
    }
    counts = np.bincount(pairs[:, 1], minlength=rows)
    drawn = jnp.asarray(np.log((counts + 1.0) / len(pairs)), jnp.float32)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, 2e-2, min(30, steps // 2), steps, 1e-3
    )
    adam = optax.adam(rate, b1=0.9, b2=0.98)
    state = adam.init(params)

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
        with jax.numpy_dtype_promotion("standard"):
            updates, state = adam.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    order = random.permutation(len(pairs))
    loss = jnp.float32(0)
    for i in range(steps):
        at = i * batch % (len(pairs) - batch)
        chosen = pairs[order[at : at + batch]]
        params, state, loss = step(params, state, chosen[:, 0], chosen[:, 1])
    logger.info("bigram head: %d steps, loss %.3f", steps, float(loss))
    return params["w1"], params["w2"]
