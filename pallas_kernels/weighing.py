"""The first two stages of every GPU kernel: what weighs the tokens of a row.

    tops      the maximum of a row and its lowest id
    totals    Z, the exact sum of powers, and the lowest id of the highest power

Each is one launch and reads the logits once. Everything behind the maximum is integer
arithmetic, so neither splits nor tiles show in a weight, and the functions of arrays
are those of the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic_gpu as gpu
from pallas_kernels.fixed_point import (
    LOW,
    TOP_POWER,
    Normaliser,
    carry,
    normaliser,
    powers,
    units,
)
from pallas_kernels.integer_rows import token_exponents
from pallas_kernels.mosaic_gpu import NO_ID, Parts, Tuning


def row_top(parts: Parts, top_ref: Any, first_ref: Any) -> tuple[jax.Array, jax.Array]:
    """Maximum of a row and the lowest id that has it, from what `tops` left."""
    each = parts.read(top_ref, -jnp.inf)
    top = jnp.max(each)
    first = parts.read(first_ref, NO_ID)
    return top, jnp.min(jnp.where(each == top, first, NO_ID))


def tops(
    logits: jax.Array, tuning: Tuning, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """First stage: maxima.

    Args:
      logits: bfloat16 or float32[R, V], V at least `TILE`.
      tuning: layout of the work.
      interpret: parameters of interpret mode, or None.

    Returns:
      (float32[R, LANES], int32[R, LANES]), for `row_top`.
    """
    rows, width = logits.shape
    how = gpu.layout(logits.dtype, tuning)

    def row_tops(logits_ref, top_ref, first_ref):
        row, split = lax.axis_index("row"), lax.axis_index("split")

        def look(index, carried):
            best, first = carried
            tile = gpu.tile_at(index, width, how)
            x = gpu.read_logits(logits_ref, row, tile, how)
            # The lowest id of a lane comes first, and stays on ties.
            better = x > best
            return jnp.where(better, x, best), jnp.where(better, tile.ids, first)

        start = (
            gpu.constant(-jnp.inf, jnp.float32, how),
            gpu.constant(NO_ID, jnp.int32, how),
        )
        best, first = gpu.for_own_tiles(look, start, width, tuning.splits)
        top = jnp.max(best)
        top_ref[row, split] = top
        first_ref[row, split] = jnp.min(jnp.where(best == top, first, NO_ID))

    out = [gpu.lanes(jnp.float32, rows), gpu.lanes(jnp.int32, rows)]
    grid = (rows, tuning.splits)
    return gpu.launch(row_tops, out, grid, interpret)(logits)


def totals(
    logits: jax.Array,
    scale: jax.Array,
    top: jax.Array,
    first: jax.Array,
    tuning: Tuning,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Second stage: exact sums of powers.

    Args:
      logits: as for `tops`.
      scale: float32[R].
      top: float32[R, LANES] of `tops`.
      first: int32[R, LANES] of `tops`.
      tuning: of `tops`.
      interpret: as for `tops`.

    Returns:
      (high, low, taker): uint32, uint32 and int32[R, LANES]; a row's
      sum is theirs, `taker` the lowest id that has the highest power.
    """
    rows, width = logits.shape
    how = gpu.layout(logits.dtype, tuning)

    def row_totals(
        logits_ref, scale_ref, top_ref, first_ref, high_ref, low_ref, taker_ref
    ):
        row, split = lax.axis_index("row"), lax.axis_index("split")
        top, first = row_top(Parts(row, tuning.splits), top_ref, first_ref)
        scale = scale_ref[row]

        def add(index, carried):
            high, low, taker = carried
            tile = gpu.tile_at(index, width, how)
            x = gpu.read_logits(logits_ref, row, tile, how)
            power = powers(token_exponents(x, tile.ids, top, first, scale))
            power = jnp.where(tile.own, power, jnp.uint32(0))
            highest = power == jnp.uint32(TOP_POWER)
            return (
                high + (power >> 20),
                low + (power & jnp.uint32(LOW)),
                jnp.minimum(taker, jnp.where(highest, tile.ids, NO_ID)),
            )

        start = (
            gpu.constant(0, jnp.uint32, how),
            gpu.constant(0, jnp.uint32, how),
            gpu.constant(NO_ID, jnp.int32, how),
        )
        high, low, taker = gpu.for_own_tiles(add, start, width, tuning.splits)
        # A lane's low words were at most 2^10, of 20 bits each.
        high, low = carry(high, low)
        high, low = carry(jnp.sum(high), jnp.sum(low))
        high_ref[row, split] = high
        low_ref[row, split] = low
        taker_ref[row, split] = jnp.min(taker)

    out = [
        gpu.lanes(jnp.uint32, rows),
        gpu.lanes(jnp.uint32, rows),
        gpu.lanes(jnp.int32, rows),
    ]
    grid = (rows, tuning.splits)
    return gpu.launch(row_totals, out, grid, interpret)(logits, scale, top, first)


def weighing(
    logits: jax.Array, scale: jax.Array, tuning: Tuning, interpret: Any
) -> tuple[jax.Array, ...]:
    """Both first stages: what `Law.weigher` reads, one array a reference."""
    top, first = tops(logits, tuning, interpret)
    return scale, top, first, *totals(logits, scale, top, first, tuning, interpret)


@dataclass(frozen=True)
class Law:
    """What a weight is: static, known to all stages.

    Attributes:
      vocab: tokens of a row, without padding.
      total: what a row sums to.
      tuning: layout of the work.
      interpret: parameters of interpret mode, or None.
    """

    vocab: int
    total: int
    tuning: Tuning
    interpret: Any = None

    def weigher(self, row: jax.Array, refs: Sequence[Any]) -> Weigher:
        """What weighs the tokens of a row, read from `weighing`'s arrays."""
        scale_ref, top_ref, first_ref, high_ref, low_ref, taker_ref = refs
        parts = Parts(row, self.tuning.splits)
        top, first = row_top(parts, top_ref, first_ref)
        high, low = parts.read(high_ref, 0), parts.read(low_ref, 0)
        high, low = carry(jnp.sum(high), jnp.sum(low))
        norm = normaliser(high, low, self.vocab, self.total)
        taker = jnp.min(parts.read(taker_ref, NO_ID))
        return Weigher(top, first, scale_ref[row], norm, taker, self.total)


class Weigher(NamedTuple):
    """Weighs the tokens of one row; the remainder goes to the taker.

    taker: int32, `NO_ID` in a row without a law.
    """

    top: jax.Array
    first: jax.Array
    scale: jax.Array
    norm: Normaliser
    taker: jax.Array
    total: int

    def __call__(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """int32[...], weights without the remainder."""
        exponent = token_exponents(logits, ids, self.top, self.first, self.scale)
        return units(powers(exponent), self.norm, self.total)

    @property
    def usable(self) -> jax.Array:
        """Whether the row has a law."""
        return self.taker != NO_ID

    def of_taker(self, weight: jax.Array) -> jax.Array:
        """The taker's weight with the remainder; `weight` is the sum without it."""
        best = units(jnp.uint32(TOP_POWER), self.norm, self.total)
        return jnp.where(self.usable, best + self.total - weight, 0)
