"""Hyper-connections: four residual streams, read and written by learned mixtures.

A sublayer reads one weighted sum of the streams and writes back to all of them, while a
doubly stochastic matrix mixes the streams with each other (DeepSeek-V4, manifold
constrained hyper-connections):

    in    = sum_j pre_j X_j
    X'_k  = post_k y + sum_j C_jk X_j

Everything here is float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config_v4 import V4Config
from dspark_jax.models.layers import matmul, rms_normalise
from dspark_jax.models.params import declare


class HyperConnection(nnx.Module):
    """The mixtures around one sublayer."""

    def __init__(self, config: V4Config):
        """Declares `fn [(2 + S) S, S H]`, `base` and three `scale`s."""
        streams, count = config.streams, (2 + config.streams) * config.streams
        width = streams * config.hidden_size
        self.fn = declare((count, width), "float32", (None, None))
        self.base = declare((count,), "float32", (None,))
        self.scale = declare((3,), "float32", (None,))
        self.streams, self.eps = streams, config.rms_norm_eps
        self.hc_eps, self.iterations = config.hc_eps, config.sinkhorn_iterations

    def mixtures(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(pre float32[G, S], post float32[G, S], C float32[G, S, S]) of streams.

        Args:
          x: float32[G, S, H].
        """
        s, eps = self.streams, jnp.float32(self.hc_eps)
        raw = _projected(x, self.fn[...], self.eps)
        base, scale = self.base[...][None], self.scale[...]
        pre = jax.nn.sigmoid(raw[:, :s] * scale[0] + base[:, :s]) + eps
        post = raw[:, s : 2 * s] * scale[1] + base[:, s : 2 * s]
        post = 2.0 * jax.nn.sigmoid(post)
        mix = raw[:, 2 * s :] * scale[2] + base[:, 2 * s :]
        mix = jax.nn.softmax(mix.reshape(-1, s, s), axis=-1) + eps
        # Columns come first and last: one more of them than of rows.
        mix = _normalised(mix, 1, eps)

        def both(_: int, mix: jax.Array) -> jax.Array:
            return _normalised(_normalised(mix, 2, eps), 1, eps)

        # A loop: written out, its steps are most of a layer's program.
        return pre, post, jax.lax.fori_loop(0, self.iterations - 1, both, mix)


class HeadMixture(nnx.Module):
    """The sum of the streams that the output head reads."""

    def __init__(self, config: V4Config):
        """Declares `fn [S, S H]`, `base` and one `scale`."""
        streams = config.streams
        width = streams * config.hidden_size
        self.fn = declare((streams, width), "float32", (None, None))
        self.base = declare((streams,), "float32", (None,))
        self.scale = declare((1,), "float32", (None,))
        self.eps, self.hc_eps = config.rms_norm_eps, config.hc_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32[G, S, H] -> float32[G, H]."""
        raw = _projected(x, self.fn[...], self.eps)
        raw = raw * self.scale[...][None] + self.base[...][None]
        return collapse(x, jax.nn.sigmoid(raw) + jnp.float32(self.hc_eps))


def spread(x: jax.Array, streams: int) -> jax.Array:
    """The streams' start: `streams` copies of float32[G, H]."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], streams, x.shape[1]))


def collapse(x: jax.Array, weights: jax.Array) -> jax.Array:
    """sum_j weights_j X_j: float32[G, S, H], float32[G, S] -> float32[G, H]."""
    return jnp.sum(x * weights[:, :, None], axis=1)


def mixed(x: jax.Array, y: jax.Array, post: jax.Array, mix: jax.Array) -> jax.Array:
    """The streams behind a sublayer.

    Args:
      x: float32[G, S, H]. Streams before it.
      y: float32[G, H]. Its output.
      post: float32[G, S].
      mix: float32[G, S, S]. Summed over its first stream axis.

    Returns:
      float32[G, S, H].
    """
    streams = x.shape[1]
    kept = sum(mix[:, j, :, None] * x[:, j, None] for j in range(streams))
    return post[:, :, None] * y[:, None] + kept


def _projected(x: jax.Array, fn: jax.Array, eps: float) -> jax.Array:
    """fn applied to the normed concatenation of all streams."""
    return matmul(rms_normalise(x.reshape(x.shape[0], -1), eps), fn)


def _normalised(x: jax.Array, axis: int, eps: jax.Array) -> jax.Array:
    return x / (jnp.sum(x, axis=axis, keepdims=True) + eps)
