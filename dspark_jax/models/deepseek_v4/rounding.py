"""Rounding of activations as the published engine does it, behind a setting.

    8 bits   x -> e4m3(x / s) s, s = 2^ceil(log2(max(|x|max, 1e-4) / 448))
    4 bits   x -> e2m1(x / s) s, s = 2^ceil(log2(max(|x|max, 6 * 2^-126) / 6))

One s a block of neighbouring channels. DeepSeek-V4 was trained with window keys and
compressed entries in 8 bits, and the indexer's inputs, turned by a Hadamard matrix,
in 4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

KEY_BLOCK = 64
INDEX_BLOCK = 32


def round_fp8(x: jax.Array, block: int) -> jax.Array:
    """float32[..., d] rounded to 8-bit floats in blocks of `block` channels."""

    def narrow(scaled: jax.Array) -> jax.Array:
        scaled = jnp.clip(scaled, -448.0, 448.0)
        return scaled.astype(jnp.float8_e4m3fn).astype(jnp.float32)

    return _by_block(x, block, 448.0, 1e-4, narrow)


def round_fp4(x: jax.Array, block: int) -> jax.Array:
    """float32[..., d] rounded to 4-bit floats in blocks of `block` channels."""
    return _by_block(x, block, 6.0, 6.0 * 2.0**-126, _to_e2m1)


def round_keys(x: jax.Array, rope_dim: int) -> jax.Array:
    """Keys or entries float32[..., d]; the rotated last channels stay."""
    plain = x.shape[-1] - rope_dim
    kept = x[..., plain:]
    rounded = round_fp8(x[..., :plain], min(KEY_BLOCK, plain))
    return jnp.concatenate([rounded, kept], axis=-1)


def round_index(x: jax.Array) -> jax.Array:
    """The indexer's queries or keys float32[..., d], d a power of two."""
    return round_fp4(hadamard(x), min(INDEX_BLOCK, x.shape[-1]))


def hadamard(x: jax.Array) -> jax.Array:
    """x times the orthonormal Hadamard matrix (Sylvester's order)."""
    size = x.shape[-1]
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix = matrix / np.float32(np.sqrt(size))
    return jnp.matmul(x, jnp.asarray(matrix), precision=jax.lax.Precision.HIGHEST)


def _by_block(x: jax.Array, block: int, most: float, least: float, narrow):
    parts = x.reshape(*x.shape[:-1], -1, block)
    top = jnp.max(jnp.abs(parts), axis=-1, keepdims=True)
    scale = _power_above(jnp.maximum(top, jnp.float32(least)) / jnp.float32(most))
    return (narrow(parts / scale) * scale).reshape(x.shape)


def _power_above(x: jax.Array) -> jax.Array:
    """The least power of two that is not below x > 0."""
    mantissa, exponent = jnp.frexp(x)
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    return jnp.ldexp(jnp.ones_like(x), exponent)


def _to_e2m1(x: jax.Array) -> jax.Array:
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with x's sign, ties to even codes."""
    size = jnp.clip(jnp.abs(x), 0.0, 6.0)
    step = jnp.where(size < 2.0, 0.5, jnp.where(size < 4.0, 1.0, 2.0))
    return jnp.sign(x) * jnp.round(size / step) * step
