"""Matrices of 8-bit integers, multiplied in whole numbers.

    w[o, i] ~ q[o, i] * scale[o],  q in -127..127,  scale = max |w[o]| / 127
    x[r, i] ~ n[r, i] * unit[r],   n a whole number of 15 bits or fewer
    y[r, o] = (sum over i of n[r, i] * q[o, i]) * unit[r] * scale[o]

The sums are exact in int32: `n` is as fine as the width allows. So they do not depend
on the order of summing, nor on how many rows are multiplied at once or by which
of the two ways below.

XLA on CPU multiplies short floats by packing the matrix first, which takes longer than
reading it. One or two rows go another way here: a row of the matrix is cut in chunks of
some lanes, and the sum over the chunks is written out term by term, which becomes one
loop without packing. More rows are multiplied by XLA's int8 product: a row's
whole numbers are two digits of base 128 there, and digits are rows.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

LARGEST = 127
BASE = 128
# Two signed digits hold it.
MOST = LARGEST * BASE
# Above so many rows XLA's product is faster.
FEW_ROWS = 2
LANES = 32
# Terms written out; a row is cut in wider chunks rather than in more.
MOST_TERMS = 64
# Smaller matrices are not worth it, and may be used in other ways.
FEWEST = 64
BIGGEST_FLOAT = 3.4028234e38


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["q", "scale"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Int8:
    """A weight `[out, in]`; stands where an array would.

    Attributes:
      q: int8[out, in].
      scale: float32[out].
    """

    q: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        return self.q.shape

    @property
    def ndim(self) -> int:
        """2."""
        return self.q.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """int8."""
        return self.q.dtype

    @property
    def size(self) -> int:
        """Parameters, scales not counted."""
        return self.q.size

    @property
    def nbytes(self) -> int:
        """Bytes, scales counted."""
        return self.q.nbytes + self.scale.nbytes

    def __getitem__(self, index: object) -> Int8:
        """Itself for `...`, as a module's parameter is asked for.

        Raises:
          TypeError: another index.
        """
        if index is not Ellipsis:
            raise TypeError(f"an Int8 weight has no index {index!r}; see `rows_of`")
        return self


def can_quantise(leaf: jax.Array) -> bool:
    """Whether a weight is a matrix of floats that is large enough."""
    floats = jnp.issubdtype(leaf.dtype, jnp.floating)
    return bool(floats) and leaf.ndim == 2 and min(leaf.shape) >= FEWEST


def quantise(weight: jax.Array) -> Int8:
    """A weight `[out, in]` with the nearest whole numbers and a scale an output."""
    x = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=1) / jnp.float32(LARGEST)
    # A row of zeros has no scale of its own.
    safe = jnp.where(scale > 0, scale, jnp.float32(1))
    return Int8(jnp.rint(x / safe[:, None]).astype(jnp.int8), scale)


def rows_of(weight: Int8, ids: jax.Array) -> jax.Array:
    """float32[..., in]. Rows of a table, with their scales."""
    taken = jnp.take(weight.q, ids, axis=0, mode="clip").astype(jnp.float32)
    return taken * jnp.take(weight.scale, ids, mode="clip")[..., None]


def product(x: jax.Array, weight: Int8) -> jax.Array:
    """float32[R, in] times a weight, float32[R, out]."""
    n, unit = whole_numbers(x)
    chunked = len(x) <= FEW_ROWS and lanes_of(x.shape[1]) is not None
    sums = (_by_chunks if chunked else _by_digits)(n, weight.q)
    y = sums.astype(jnp.float32) * unit * weight.scale[None]
    # A multiplication that goes straight into a sum may lose its own rounding, in some
    # programs and not in others.
    return jax.lax.clamp(-jnp.float32(BIGGEST_FLOAT), y, jnp.float32(BIGGEST_FLOAT))


def whole_numbers(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(int32[R, in], float32[R, 1]): x as multiples of a unit a row.

    The largest of a row is the largest whole number with which no sum of products
    leaves int32. Rows of zeros have the unit 0.
    """
    most = jnp.float32(largest(x.shape[1]))
    unit = jnp.max(jnp.abs(x), axis=1, keepdims=True) / most
    n = jnp.clip(jnp.rint(x / jnp.where(unit > 0, unit, 1)), -most, most)
    return n.astype(jnp.int32), unit


def largest(width: int) -> int:
    """The largest whole number of rows of `width` values."""
    return min(MOST, (2**31 - 1) // (LARGEST * width))


def lanes_of(width: int) -> int | None:
    """Lanes of a chunk; None for widths that cannot be cut evenly."""
    lanes = LANES
    while width // lanes > MOST_TERMS:
        lanes *= 2
    return lanes if width % lanes == 0 else None


def _by_chunks(n: jax.Array, q: jax.Array) -> jax.Array:
    """int32[R, in] times int8[out, in], int32[R, out]."""
    lanes = lanes_of(q.shape[1])
    assert lanes is not None
    rows, terms = len(n), q.shape[1] // lanes
    n = n.reshape(rows, terms, lanes)
    q = q.reshape(len(q), terms, lanes)
    products = (q[:, None, k].astype(jnp.int32) * n[None, :, k] for k in range(terms))
    # Together with the sum over lanes it would not become a loop over lanes.
    by_lane = jax.lax.optimization_barrier(functools.reduce(jnp.add, products))
    return jnp.sum(by_lane, axis=2).T


def _by_digits(n: jax.Array, q: jax.Array) -> jax.Array:
    """int32[R, in] times int8[out, in], int32[R, out]."""
    # Low digits are -64..63; an arithmetic shift rounds down.
    high = (n + BASE // 2) // BASE
    digits = jnp.concatenate([high, n - high * BASE]).astype(jnp.int8)
    sums = jax.lax.dot_general(
        digits, q, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    return sums[: len(n)] * BASE + sums[len(n) :]
