"""Where a draft's weights start: the target's last layers, a bigram Markov head."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dspark_jax.config import DraftConfig
from dspark_jax.models.draft import backbone
from dspark_jax.models.params import Tree, flatten, layer_at, random_params, unflatten


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
    passes: float = 0.6,
    batch: int = 1024,
) -> tuple[np.ndarray, np.ndarray]:
    """W1 and W2 of a Markov head that predicts the next token on its own.

    It needs no features, so it sees all the text there is.

    Args:
      pairs: int32[N, 2]. Previous id, and row of the next one in the draft's
        vocabulary.
      vocab: rows of W1.
      rows: rows of W2.
      rank: their width.
      seed: of the initial values and the order.
      passes: over the pairs.
      batch: pairs per step.
    """
    random = np.random.default_rng(seed)
    scale = rank**-0.5
    params = {
        "w1": jnp.asarray(random.normal(size=(vocab, rank)) * scale, jnp.float32),
        "w2": jnp.asarray(random.normal(size=(rows, rank)) * 0.1, jnp.float32),
    }
    steps = int(len(pairs) * passes) // batch
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-2, 30, steps, 5e-4)
    optimiser = optax.adam(rate, b1=0.9, b2=0.98)
    state = optimiser.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, previous, following):
        def loss_of(p):
            z = jnp.take(p["w1"], previous, axis=0).astype(jnp.bfloat16)
            logits = jax.lax.dot_general(
                z,
                p["w2"].astype(jnp.bfloat16),
                (((1,), (1,)), ((), ())),
                preferred_element_type=jnp.float32,
            )
            picked = jnp.take_along_axis(logits, following[:, None], axis=1)[:, 0]
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    order = random.permutation(np.arange(int(np.ceil(passes)) * len(pairs)) % len(pairs))
    mean = 0.0
    for i in range(steps):
        rows_ = pairs[order[i * batch : (i + 1) * batch]]
        params, state, loss = step(params, state, rows_[:, 0], rows_[:, 1])
        mean = 0.98 * mean + 0.02 * float(loss)
        if i % 50 == 49:
            print(f"bigram step {i + 1}/{steps} loss {mean / (1 - 0.98 ** (i + 1)):.3f}", flush=True)
    return np.asarray(params["w1"]), np.asarray(params["w2"])
