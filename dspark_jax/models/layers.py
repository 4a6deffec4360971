"""Layers shared by targets and drafts: norms, projections, rotary embedding.

Activations are float32 throughout. A matrix product casts its input to the
weight's dtype and accumulates in float32, so bfloat16 weights cost their own
rounding and nothing else. Weights are `[out, in]`,
or cut in panels (`panels`), or whole numbers (`int8`).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.config import RopeConfig
from dspark_jax.models import int8, panels
from dspark_jax.models.int8 import Int8
from dspark_jax.models.params import Axes, declare

# Norms sum at least this many rows at once.
NORM_ROWS = 8


def matmul(x: jax.Array, weight: jax.Array | Int8) -> jax.Array:
    """`x @ weight.T` accumulated in float32.

    Args:
      x: float32[..., in].
      weight: [out, in], any float dtype, or its panels, or whole numbers.

    Returns:
      float32[..., out].
    """
    if isinstance(weight, Int8):
        flat = int8.product(x.reshape(-1, x.shape[-1]), weight)
        return flat.reshape(*x.shape[:-1], weight.shape[0])
    out = panels.whole_shape(weight.shape)[0]
    if x.size == x.shape[-1] and weight.dtype != jnp.float32:
        # XLA on CPU has no fast path for one row of short floats (12-25x).
        pair = jnp.broadcast_to(x.reshape(1, -1), (2, x.shape[-1]))
        return matmul(pair, weight)[:1].reshape(*x.shape[:-1], out)
    if panels.is_cut(weight.shape):
        flat = panels.product(x.reshape(-1, x.shape[-1]), weight)
        return flat.reshape(*x.shape[:-1], out)
    # Accelerators would otherwise round float32 inputs to shorter formats.
    exact = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    )


class Linear(nnx.Module):
    """`y = x W^T + b` with `W` `[out, in]`."""

    def __init__(
        self, out_dim: int, in_dim: int, axes: Axes, dtype: str, bias: bool = False
    ):
        """Declares the weight, and the bias when asked for."""
        self.weight = declare((out_dim, in_dim), dtype, axes)
        self.bias = declare((out_dim,), dtype, axes[:1]) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: float32[..., in] -> float32[..., out]."""
        y = matmul(x, self.weight[...])
        if self.bias is None:
            return y
        bias = self.bias[...].astype(jnp.float32)
        return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)


class Table(nnx.Module):
    """A weight without an operation of its own: embedding or output head."""

    def __init__(self, rows: int, width: int, axes: Axes, dtype: str):
        """Declares `[rows, width]`."""
        self.weight = declare((rows, width), dtype, axes)


class Norm(nnx.Module):
    """Root-mean-square norm with a gain over the last axis."""

    def __init__(self, width: int, eps: float, dtype: str):
        """Declares the gain `[width]`."""
        self.weight = declare((width,), dtype, (None,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: float32[..., width] -> the same shape."""
        gain = self.weight[...].astype(jnp.float32)
        return rms_normalise(x, self.eps) * gain.reshape((1,) * (x.ndim - 1) + (-1,))


class Scalar(nnx.Module):
    """One learned factor."""

    def __init__(self, dtype: str):
        """Declares `[1]`."""
        self.weight = declare((1,), dtype, (None,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiplies every element of x."""
        return x * self.weight[...].astype(jnp.float32).reshape((1,) * x.ndim)


def rms_normalise(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, float32."""
    rows = math.prod(x.shape[:-1])
    squares = jnp.square(x)
    if rows < NORM_ROWS:
        # XLA on CPU sums few rows in another order than many.
        flat = squares.reshape(rows, -1)
        flat = jnp.pad(flat, ((0, NORM_ROWS - rows), (0, 0)))
        mean = jnp.mean(flat, axis=-1)[:rows].reshape(*x.shape[:-1], 1)
    else:
        mean = jnp.mean(squares, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + jnp.float32(eps))


def embed(table: jax.Array | Int8, ids: jax.Array) -> jax.Array:
    """Rows `ids` of `table` as float32[..., H]."""
    if isinstance(table, Int8):
        return int8.rows_of(table, ids)
    return jnp.take(table, ids, axis=0, mode="clip").astype(jnp.float32)


def embed_scale(hidden_size: int, dtype: str) -> jax.Array:
    """sqrt(H) rounded to the weight dtype (Gemma4)."""
    scale = jnp.asarray(math.sqrt(hidden_size), jnp.dtype(dtype))
    return scale.astype(jnp.float32)


def softcap(logits: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(logits / cap), or the logits when there is no cap."""
    if cap is None:
        return logits
    return jnp.float32(cap) * jnp.tanh(logits / jnp.float32(cap))


def existing(logits: jax.Array, valid: int | None) -> jax.Array:
    """float32[R, V] with ids from `valid` on at -inf; None: all exist."""
    if valid is None or valid == logits.shape[-1]:
        return logits
    exists = jnp.arange(logits.shape[-1], dtype=jnp.int32) < valid
    return jnp.where(exists[None], logits, -jnp.inf)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies and the factor on cos and sin.

    Returns:
      (float32[head_dim / 2], scale).

    The rules are those of the published configs: position interpolation
    (`linear`), the Llama 3 wavelength blend, YaRN's ramp between interpolated
    and original frequencies, and Gemma's rotation of a leading share.
    """
    half = head_dim // 2
    exponents = np.arange(half, dtype=np.float32) * np.float32(2.0 / head_dim)
    inverse = (1.0 / (np.float64(rope.theta) ** exponents)).astype(np.float64)
    if rope.kind == "linear":
        return (inverse / rope.factor).astype(np.float32), 1.0
    if rope.kind == "proportional":
        rotated = int(rope.partial * head_dim // 2)
        inverse[rotated:] = 0.0
        return (inverse / rope.factor).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse).astype(np.float32), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inverse, head_dim)
    return inverse.astype(np.float32), 1.0


def _llama3(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    """Long waves are stretched, short ones kept, a linear blend between."""
    wavelength = 2 * np.pi / inverse
    span = rope.high_freq_factor - rope.low_freq_factor
    turns = rope.original_max_position / wavelength
    keep = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
    return keep * inverse + (1 - keep) * inverse / rope.factor


def _yarn(
    rope: RopeConfig, inverse: np.ndarray, head_dim: int
) -> tuple[np.ndarray, float]:
    """YaRN: ramp from original to interpolated frequencies over dimensions."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    ramp = np.clip((np.arange(len(inverse)) - low) / span, 0.0, 1.0)
    scaled = inverse / rope.factor * ramp + inverse * (1 - ramp)
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return scaled.astype(np.float32), factor


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cos and sin for rotate-half, float32[*positions.shape, head_dim / 2]."""
    inverse, scale = rope_frequencies(rope, head_dim)
    inverse = jnp.asarray(inverse).reshape((1,) * positions.ndim + (-1,))
    angles = positions.astype(jnp.float32)[..., None] * inverse
    return jnp.cos(angles) * jnp.float32(scale), jnp.sin(angles) * jnp.float32(scale)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Applies rotary embedding in the half-split form.

    Args:
      x: float32[..., d].
      cos: float32[..., d / 2], broadcast-compatible with x's leading axes.
      sin: as cos.
    """
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
