"""Matrices as they are published: 8-bit and 4-bit floats with scales of powers of two.

    8 bits   W[i, j] = e4m3(weight[i, j]) * 2^(scale[i // 128, j // 128] - 127)
    4 bits   W[i, 2j] = e2m1(weight[i, j] & 15), W[i, 2j + 1] = e2m1(weight[i, j] >> 4),
             both times 2^(scale[i, 2j // 32] - 127)

Bytes are kept as uint8. Every value of both formats is a bfloat16 number, so expanding
them loses nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config_v4 import Weights
from dspark_jax.models.layers import matmul
from dspark_jax.models.params import Axes, declare

BLOCK = 128
GROUP = 32


class Matrix(nnx.Module):
    """A weight `[out, in]`, plain or in 8 bits with scales."""

    def __init__(
        self,
        out_dim: int,
        in_dim: int,
        axes: Axes,
        dtype: str,
        weights: Weights = "float",
        in_float32: bool = False,
    ):
        """Declares `weight`, and `scale` when there are scales.

        `in_float32` multiplies in float32 whatever the weight's type is.
        """
        self.in_float32 = in_float32
        plain, grid = weights == "float", (-(-out_dim // BLOCK), -(-in_dim // BLOCK))
        self.weight = declare((out_dim, in_dim), dtype if plain else "uint8", axes)
        self.scale = None if plain else declare(grid, "uint8", axes)

    def expanded(self) -> jax.Array:
        """The matrix in a float type."""
        if self.scale is not None:
            return expand_fp8(self.weight[...], self.scale[...])
        weight = self.weight[...]
        return weight.astype(jnp.float32) if self.in_float32 else weight

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: float32[..., in] -> float32[..., out]."""
        return matmul(x, self.expanded())


class ExpertMatrix(nnx.Module):
    """One matrix of every expert, `[E, out, in]`, plain or in 4 bits with scales."""

    def __init__(
        self, experts: int, out_dim: int, in_dim: int, dtype: str, weights: Weights
    ):
        """Declares `weight`, and `scale` when there are scales."""
        axes = ("experts", None, None)
        plain, columns = weights == "float", -(-in_dim // GROUP)
        shape = (experts, out_dim, in_dim if plain else in_dim // 2)
        self.weight = declare(shape, dtype if plain else "uint8", axes)
        scale = (experts, out_dim, columns)
        self.scale = None if plain else declare(scale, "uint8", axes)

    @property
    def count(self) -> int:
        """Experts that lie here."""
        return self.weight[...].shape[0]

    def of(self, expert: jax.Array) -> jax.Array:
        """The matrix of one expert [out, in] in a float type; expert: int32[]."""

        def pick(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(x, expert, 0, keepdims=False)

        weight = pick(self.weight[...])
        if self.scale is None:
            return weight
        return expand_fp4(weight, pick(self.scale[...]))


def exponents(scale: jax.Array) -> jax.Array:
    """2^(byte - 127) of uint8 bytes as bfloat16; byte 255 is NaN (E8M0)."""
    # The bits of a bfloat16's exponent; byte 0 is 2^-127, a subnormal.
    bits = scale.astype(jnp.uint16) << 7
    bits = jnp.where(scale == 0, jnp.uint16(0x0040), bits)
    bits = jnp.where(scale == 255, jnp.uint16(0x7FC0), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def expand_fp8(weight: jax.Array, scale: jax.Array) -> jax.Array:
    """bfloat16[out, in] of uint8[out, in] and uint8[ceil(out/128), ceil(in/128)]."""
    rows, columns = weight.shape
    values = jax.lax.bitcast_convert_type(weight, jnp.float8_e4m3fn)
    factors = jnp.repeat(exponents(scale), BLOCK, axis=0)[:rows]
    factors = jnp.repeat(factors, BLOCK, axis=1)[:, :columns]
    return values.astype(jnp.bfloat16) * factors


def expand_fp4(weight: jax.Array, scale: jax.Array) -> jax.Array:
    """bfloat16[out, in] of uint8[out, in / 2] and uint8[out, in / 32]."""
    rows, half = weight.shape
    codes = jnp.stack([weight & 15, weight >> 4], axis=-1).reshape(rows, 2 * half)
    factors = jnp.repeat(exponents(scale), GROUP, axis=1)[:, : 2 * half]
    return e2m1(codes) * factors


def e2m1(codes: jax.Array) -> jax.Array:
    """Values of 4-bit codes 0..15: 0, .5, 1, 1.5, 2, 3, 4, 6 and the same negated."""
    low = codes & 7
    # Half the value of codes below 2; else (2 + last bit) 2^(exponent - 2).
    exponent = jnp.maximum(low >> 1, 1).astype(jnp.uint16)
    mantissa = jnp.where(low < 2, low, 2 + (low & 1)).astype(jnp.bfloat16)
    power = jax.lax.bitcast_convert_type((exponent + 125) << 7, jnp.bfloat16)
    value = mantissa * power
    return jnp.where(codes >= 8, -value, value)
