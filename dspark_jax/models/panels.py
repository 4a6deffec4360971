"""Matrices cut in panels, which a CPU reads from front to back.

XLA on CPU multiplies a few rows by a matrix `[out, in]` from many distant rows at
once, and the memory is slower at that. A panel holds 64 outputs, `[in, 64]`; cut
matrices are `[out / 64, in, 64]`. The products are the same to the bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

PANEL = 64
# With fewer, the cores do not share the panels evenly.
FEWEST = 8


def can_cut(leaf: jax.Array) -> bool:
    """Whether cutting helps: short floats `[out, in]` with enough panels."""
    short = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 2
    whole, rest = divmod(leaf.shape[0], PANEL)
    return bool(short) and leaf.ndim == 2 and rest == 0 and whole >= FEWEST


def cut(weight: jax.Array) -> jax.Array:
    """[out, in] -> [out / 64, in, 64]."""
    out, into = weight.shape
    return weight.reshape(out // PANEL, PANEL, into).transpose(0, 2, 1)


def is_cut(shape: tuple[int, ...]) -> bool:
    """Whether a layer's weight of this shape is cut."""
    return len(shape) == 3


def whole_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape before cutting; of anything else the shape itself."""
    return (shape[0] * shape[2], shape[1]) if is_cut(shape) else shape


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """float32[R, in] times a cut weight, float32[R, out]."""
    rows = jnp.broadcast_to(x.astype(weight.dtype)[None], (len(weight), *x.shape))
    by_panel = jax.lax.dot_general(
        rows,
        weight,
        (((2,), (1,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
    return by_panel.transpose(1, 0, 2).reshape(len(x), -1)
