"""Running a stack of decoder layers, one by one or as a scan."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config import DecoderConfig, LayerKind
from dspark_jax.models.decoder_layer import BlockView, DecoderLayer
from dspark_jax.models.kv_cache import Cache
from dspark_jax.models.params import Tree, build, is_listed, layer_at


@functools.cache
def layer_declaration(config: DecoderConfig, kind: LayerKind):
    """(graphdef, shapes, axes) of one layer of `kind`; see `params.build`."""
    return build(lambda: DecoderLayer(config, kind))


def layer_module(config: DecoderConfig, kind: LayerKind, params: Tree) -> DecoderLayer:
    """The layer with its parameters, for use inside a trace."""
    return nnx.merge(layer_declaration(config, kind)[0], params)


def run_layers(
    config: DecoderConfig,
    layers: Tree,
    x: jax.Array,
    views: dict[str, BlockView],
    cache: Cache,
    taps: tuple[int, ...] = (),
) -> tuple[jax.Array, list[jax.Array], Cache]:
    """Evaluates all layers.

    Args:
      config: the decoder.
      layers: parameters by kind, stacked or listed; a listed group computes
        layer by layer, a single stacked group as one scan.
      x: float32[G, H]. Embedded rows.
      views: one `BlockView` a kind.
      cache: committed keys and values, only read.
      taps: layer ids whose output is wanted; -1 is the embedding.

    Returns:
      (x float32[G, H] after the last layer, the tapped outputs float32[G, H]
      in the order of `taps`, and the block's own keys and values in the
      cache's structure).
    """
    kinds = config.kinds
    if len(kinds) == 1 and not is_listed(layers[kinds[0]]):
        return _scan(config, kinds[0], layers, x, views, cache, taps)
    outputs = {-1: x}
    fresh: dict[str, dict[str, list[jax.Array]]] = {
        kind: {"k": [], "v": []} for kind in kinds
    }
    for layer in range(config.num_layers):
        kind, index = config.layer_slot(layer)
        module = layer_module(config, kind, layer_at(layers[kind], index))
        store = cache[kind]
        x, k, v = module(x, views[kind], store["k"][index], store["v"][index])
        fresh[kind]["k"].append(k)
        fresh[kind]["v"].append(v)
        outputs[layer] = x
    pending: Cache = {
        kind: {
            name: _like(store, cache[kind][name]) for name, store in fresh[kind].items()
        }
        for kind in kinds
    }
    return x, [outputs[tap] for tap in taps], pending


def _like(blocks: list[jax.Array], store: Any) -> Any:
    """Blocks in the layout of a cache store: a tuple or one stacked array."""
    return tuple(blocks) if isinstance(store, tuple) else jnp.stack(blocks)


def _scan(
    config: DecoderConfig,
    kind: LayerKind,
    layers: Tree,
    x: jax.Array,
    views: dict[str, BlockView],
    cache: Cache,
    taps: tuple[int, ...],
) -> tuple[jax.Array, list[jax.Array], Cache]:
    def step(carry: jax.Array, xs: tuple[Tree, jax.Array, jax.Array]):
        params, cache_k, cache_v = xs
        module = layer_module(config, kind, params)
        out, k, v = module(carry, views[kind], cache_k, cache_v)
        return out, (out if taps else None, k, v)

    store = cache[kind]
    last, (outputs, k, v) = jax.lax.scan(
        step, x, (layers[kind], store["k"], store["v"])
    )
    tapped = [x if tap == -1 or outputs is None else outputs[tap] for tap in taps]
    return last, tapped, {kind: {"k": k, "v": v}}
