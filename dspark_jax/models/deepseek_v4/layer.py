"""One layer: attention and experts, each inside its hyper-connection."""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx

from dspark_jax.config_v4 import V4Config
from dspark_jax.models.deepseek_v4 import hyper
from dspark_jax.models.deepseek_v4.attention import Attention, View
from dspark_jax.models.deepseek_v4.experts import MoE
from dspark_jax.models.deepseek_v4.parallel import Parallel
from dspark_jax.models.layers import Norm
from dspark_jax.models.params import Tree, build


class Layer(nnx.Module):
    """Streams in, streams out."""

    def __init__(self, config: V4Config, layer: int):
        """Declares the parameters of layer number `layer`."""
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attn_hc = hyper.HyperConnection(config)
        self.attn_norm = Norm(hidden, eps, config.dtype)
        self.attn = Attention(config, config.compress_ratios[layer])
        self.ffn_hc = hyper.HyperConnection(config)
        self.ffn_norm = Norm(hidden, eps, config.dtype)
        self.ffn = MoE(config, by_token=layer < config.num_hash_layers)

    def __call__(
        self, x: jax.Array, view: View, state: dict[str, Any], parallel: Parallel
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Evaluates the rows; nothing is written.

        Args:
          x: float32[G, S, H]. Streams.
          view: of the layer's ratio.
          state: the layer's.
          parallel: see there.

        Returns:
          (float32[G, S, H], what the block adds to the state).
        """
        pre, post, mix = self.attn_hc.mixtures(x)
        h = self.attn_norm(hyper.collapse(x, pre))
        y, pending = self.attn(h, view, state, parallel)
        x = hyper.mixed(x, y, post, mix)
        return self.feed_forward(x, view.rows.token, parallel), pending

    def feed_forward(
        self, x: jax.Array, token: jax.Array, parallel: Parallel
    ) -> jax.Array:
        """The second half: float32[G, S, H] to the same shape."""
        pre, post, mix = self.ffn_hc.mixtures(x)
        h = self.ffn_norm(hyper.collapse(x, pre))
        return hyper.mixed(x, self.ffn(h, token, parallel), post, mix)


@functools.cache
def layer_declaration(config: V4Config, layer: int):
    """(graphdef, shapes, axes) of layer number `layer`; see `params.build`."""
    return build(lambda: Layer(config, layer))


def layer_module(config: V4Config, layer: int, params: Tree) -> Layer:
    """The layer with its parameters, for use inside a trace."""
    return nnx.merge(layer_declaration(config, layer)[0], params)
