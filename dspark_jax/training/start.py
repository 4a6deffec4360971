"""Where a draft's weights start: at random, from the target, or from a draft."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.pair import check_pair
from dspark_jax.config import DecoderConfig
from dspark_jax.config_draft import DraftConfig
from dspark_jax.models.draft import backbone
from dspark_jax.models.params import Tree, flatten, layer_at, random_params, unflatten


def random_start(config: DraftConfig, seed: int) -> Tree:
    """Float32 weights at random; the frozen `d2t` is not among them."""
    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
        for path, leaf in flatten(backbone.abstract_draft_params(config)).items()
        if path != ("d2t",)
    }
    flat = flatten(random_params(unflatten(shapes), jax.random.key(seed)))
    if config.confidence:
        where = ("confidence", "weight")
        flat[where] = 0.1 * flat[where]
    return unflatten(flat)


def target_start(
    config: DraftConfig,
    target: DecoderConfig,
    target_params: Tree,
    scale: np.ndarray,
    seed: int,
) -> Tree:
    """Float32 weights whose layers are copies of the target's last ones.

    Key/value heads are repeated where the draft has more of them. `fc` starts as the
    last tap plus small noise, so that context keys and values are nearly those of the
    target's last layer.

    Args:
      config: the draft.
      target: its target.
      target_params: layers stacked or listed.
      scale: float32[m * H]. What the features are divided by before `fc`.
      seed: of everything that is not copied.

    Raises:
      ValueError: a draft whose layers have other sizes than the target's.
    """
    flat = flatten(random_start(config, seed))
    count, h = config.backbone.num_layers, config.backbone.hidden_size
    d = backbone.decoder_of(config).attention("full").head_dim
    if count > target.num_layers:
        raise ValueError(
            f"`start` is 'target' but the draft has {count} layers and the target "
            f"{target.num_layers}; use 'random'"
        )
    sources = []
    for layer in range(target.num_layers - count, target.num_layers):
        kind, index = target.layer_slot(layer)
        sources.append(flatten(layer_at(target_params["layers"][kind], index)))
    for path, leaf in flat.items():
        if path[0] != "layers":
            continue
        if path[2] in ("q_norm", "k_norm") and path[2:] not in sources[0]:
            # Queries and keys keep about the size they have in the target.
            gains = [
                _gain(source, path[2].replace("norm", "proj")) for source in sources
            ]
            flat[path] = jnp.stack([jnp.full(leaf.shape[1:], g) for g in gains])
            continue
        flat[path] = jnp.stack(
            [_fit(source[path[2:]], leaf.shape[1:], path, d) for source in sources]
        )
    own = scale[-h:]
    relative = jnp.asarray(own / np.sqrt(np.mean(np.square(own))))
    fc = 0.2 * flat[("fc", "weight")]
    flat[("fc", "weight")] = fc.at[:, -h:].add(jnp.diag(relative))
    first = ("input_norm", "weight")
    flat[("hidden_norm", "weight")] = sources[-1][first].astype(jnp.float32)
    gain = target_params["norm"]["weight"].astype(jnp.float32)
    # Few layers know less than the target does: a flatter law to begin with.
    flat[("norm", "weight")] = 0.3 * gain
    return unflatten(flat)


def base_config(target: DecoderConfig, draft: DraftConfig) -> DraftConfig:
    """Settings of a draft that is trained on, without its calibration.

    Raises:
      CheckpointError: it belongs to another target.
      ValueError: tables of its own, which training would leave behind.
    """
    own = [n for n in ("own_embed", "own_head") if getattr(draft, n)]
    if own:
        raise ValueError(
            f"the draft to go on from has {' and '.join(own)}; training uses the "
            "target's embedding and head: convert the draft without them"
        )
    fitted = check_pair(target, draft)
    return dataclasses.replace(
        fitted,
        confidence_temperatures=None,
        confidence_shifts=None,
        calibrated_at=None,
    )


def base_start(params: Tree, scale: np.ndarray) -> Tree:
    """Float32 weights of a draft, as training holds them.

    Args:
      params: of the draft, layers stacked.
      scale: float32[m * H]. What the features are divided by before `fc`.
    """
    # Copies: a step donates its state, and the draft stays the caller's.
    flat = {
        path: jnp.array(leaf, jnp.float32)
        for path, leaf in flatten(params).items()
        if path != ("d2t",)
    }
    flat[("fc", "weight")] = flat[("fc", "weight")] * jnp.asarray(scale)[None]
    return unflatten(flat)


def _fit(
    leaf: jax.Array, shape: tuple[int, ...], path: tuple[str, ...], head_dim: int
) -> jax.Array:
    """`leaf` in float32, its key/value heads repeated to `shape`."""
    leaf = leaf.astype(jnp.float32)
    if leaf.shape == shape:
        return leaf
    if path[2] not in ("k_proj", "v_proj") or shape[0] % leaf.shape[0]:
        raise ValueError(
            f"`start` is 'target' but {'.'.join(path)} has shape {shape} in the draft "
            f"and {leaf.shape} in the target; use 'random', or the target's sizes"
        )
    heads = leaf.reshape(-1, head_dim, *leaf.shape[1:])
    # Query heads that share a key/value head lie together, so copies do, too.
    return jnp.repeat(heads, shape[0] // leaf.shape[0], axis=0).reshape(shape)


def _gain(source: dict[tuple[str, ...], jax.Array], name: str) -> float:
    """Root mean square of a projection's outputs for inputs of unit size."""
    weight = source[(name, "weight")].astype(jnp.float32)
    gain = source[("input_norm", "weight")].astype(jnp.float32)
    sums = jnp.sum(jnp.square(weight * gain[None]), axis=1)
    return float(jnp.sqrt(jnp.mean(sums)))
