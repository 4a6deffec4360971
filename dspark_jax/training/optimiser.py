"""Adam with float32 weights, a schedule by steps, a running average of the weights."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax

from dspark_jax.models.params import Tree
from dspark_jax.training.settings import TrainConfig


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "average", "moments", "step"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step changes.

    Attributes:
      params: float32 weights.
      average: their running average; None without one.
      moments: of Adam.
      step: int32. Steps done.
    """

    params: Tree
    average: Tree | None
    moments: optax.OptState
    step: jax.Array

    @property
    def exported(self) -> Tree:
        """The weights a draft is made of."""
        return self.params if self.average is None else self.average


def optimiser(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping, Adam's direction, decoupled weight decay; no learning rate."""
    parts = [
        optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(b2=config.beta2),
    ]
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay))
    return optax.chain(*parts)


def fresh_state(config: TrainConfig, params: Tree) -> TrainState:
    """The state training starts from."""
    average = jax.tree.map(jnp.copy, params) if config.average else None
    return TrainState(params, average, optimiser(config).init(params), jnp.int32(0))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rate of the step after `step` steps; see `TrainConfig.schedule`."""
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.schedule == "cosine":
        span = max(config.steps - config.warmup, 1)
        progress = min(max(step - config.warmup, 0) / span, 1.0)
        return config.rate * warm * 0.5 * (1.0 + math.cos(math.pi * progress))
    left = config.steps - step
    cool = min(1.0, left / config.cooldown) if config.cooldown else 1.0
    return config.rate * warm * max(cool, 0.0)


def ce_weight(config: TrainConfig, step: int) -> float:
    """Weight of the cross-entropy; see `TrainConfig.ce_start`."""
    progress = min(step / config.ce_steps, 1.0) if config.ce_steps else 1.0
    return config.ce_start + (config.loss.ce - config.ce_start) * progress


def update(
    config: TrainConfig, state: TrainState, grads: Tree, rate: jax.Array
) -> TrainState:
    """One optimiser step."""
    # Optax counts on implicit promotion, which a caller may have forbidden.
    with jax.numpy_dtype_promotion("standard"):
        updates, moments = optimiser(config).update(grads, state.moments, state.params)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    step = state.step + 1
    average = state.average
    if average is not None:
        count = step.astype(jnp.float32)
        # A short memory at first: the first weights are no good.
        keep = jnp.minimum(config.average, (1.0 + count) / (10.0 + count))
        average = jax.tree.map(lambda a, p: a + (1.0 - keep) * (p - a), average, params)
    return TrainState(params, average, moments, step)
