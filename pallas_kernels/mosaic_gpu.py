"""What the GPU kernels share: tiles, blocks, and how blocks hand down what they find.

A row is cut into tiles of `TILE` tokens and its tiles are dealt to `splits` blocks,
so that few rows still occupy the whole device. No block waits for another one: what a
stage has to know of the whole row, it combines from what every block of the stage
before left in a lane of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 1024
# Lanes of the arrays through which blocks hand down their parts; at most so many
# splits.
LANES = 128
NO_ID = jnp.iinfo(jnp.int32).max


@dataclass(frozen=True)
class Tuning:
    """How the work is laid out. No choice changes a bit of a result.

    Attributes:
      splits: blocks a row, 1 .. 128.
      load_bytes: what one thread reads at once, 4 .. 16.
    """

    splits: int = 16
    load_bytes: int = 16


def default_tuning(rows: int, width: int) -> Tuning:
    """Enough blocks to occupy a large GPU twice, and no block without a tile."""
    return Tuning(splits=max(1, min(-(-264 // rows), tiles(width), LANES)))


def tiles(width: int) -> int:
    """Tiles of a row."""
    return -(-width // TILE)


def layout(dtype: Any, tuning: Tuning, length: int = TILE) -> Any:
    """How a tile lies in the registers of a warpgroup."""
    wide = tuning.load_bytes // jnp.dtype(dtype).itemsize
    return plgpu.Layout.WG_STRIDED((length,), vec_size=min(wide, length // 128))


def launch(
    body: Callable[..., None],
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    interpret: Any,
) -> Callable[..., Any]:
    """A kernel of one warpgroup a block on a grid of rows, or of rows and splits.

    In profiles it bears the name of `body`.
    """
    return plgpu.kernel(
        body,
        out_type=list(out),
        grid=grid,
        grid_names=("row", "split")[: len(grid)],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret,
    )


def lanes(dtype: Any, rows: int) -> jax.ShapeDtypeStruct:
    """An array through which the blocks of a row hand down one number each."""
    return jax.ShapeDtypeStruct((rows, LANES), dtype)


def padded(x: jax.Array, fill: float) -> jax.Array:
    """Rows of at least one tile."""
    short = TILE - x.shape[1]
    if short <= 0:
        return x
    return jnp.pad(x, ((0, 0), (0, short)), constant_values=fill)


class Tile(NamedTuple):
    """Tokens that a block looks at together.

    A row's last tile is moved back to end with the row.

    start: int32. Id of the first token.
    ids: int32[TILE].
    own: bool[TILE]. False where the tile before holds the token as well.
    """

    start: jax.Array
    ids: jax.Array
    own: jax.Array


def tile_at(index: jax.Array, width: int, how: Any) -> Tile:
    """The tile of that index in a row of `width` tokens."""
    start = jnp.minimum(index * TILE, width - TILE)
    ids = start + plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=how)
    return Tile(start, ids, ids >= index * TILE)


def read(ref: Any, row: jax.Array, tile: Tile, how: Any) -> jax.Array:
    """A tile of a row of [R, V]."""
    return plgpu.load(ref.at[row, pl.ds(tile.start, TILE)], layout=how)


def read_logits(ref: Any, row: jax.Array, tile: Tile, how: Any) -> jax.Array:
    """float32[TILE]; +inf for NaN, as no maximum need pass NaN on."""
    x = read(ref, row, tile, how).astype(jnp.float32)
    return jnp.where(x != x, jnp.inf, x)


def deal(split: Any, width: int, splits: int) -> tuple[Any, Any]:
    """The tiles first .. last - 1 of a block; every tile belongs to exactly one.

    The last tile overlaps the one before: one block has both, so that no two blocks
    write one place.

    Args:
      split: int32[...]. The block.
      width: tokens of a row.
      splits: blocks of a row.
    """
    count = tiles(width)
    pairs = max(count - 1, 1)
    each = -(-pairs // splits)
    ends = (split * each, (split + 1) * each)
    first, last = (jnp.where(end >= pairs, count, end) for end in ends)
    return first, last


def for_own_tiles(
    body: Callable[[jax.Array, Any], Any], start: Any, width: int, splits: int
) -> Any:
    """Folds `body(tile_index, carried)` over the tiles of this block."""
    first, last = deal(lax.axis_index("split"), width, splits)
    return lax.fori_loop(first, last, body, start)


def constant(value: Any, dtype: Any, how: Any, length: int = TILE) -> jax.Array:
    """A vector of one value, laid out as a tile."""
    zero = plgpu.broadcasted_iota(jnp.int32, (length,), 0, layout=how) * 0
    return zero.astype(dtype) + jnp.asarray(value, dtype)


def first_over(weights: jax.Array, ids: jax.Array, point: jax.Array) -> jax.Array:
    """Lowest index whose inclusive cumulative weight exceeds the point.

    By bisection: a warpgroup has no prefix sum.

    Args:
      weights: int32[n]. Not negative, their sum above `point`.
      ids: int32[n], 0 .. n - 1.
      point: int32. At least 0.
    """
    at = jnp.int32(0)
    step = 1 << (weights.shape[0] - 1).bit_length()
    while step := step // 2:
        below = jnp.sum(jnp.where(ids < at + step, weights, 0))
        at = jnp.where(below > point, at, at + step)
    return at


class Parts:
    """What the blocks of a row left in their lanes."""

    def __init__(self, row: jax.Array, splits: int):
        self._row = row
        self._how = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
        lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=self._how)
        self._filled = lane < splits

    def read(self, ref: Any, empty: Any) -> jax.Array:
        """[LANES], `empty` in lanes that no block owns."""
        x = plgpu.load(ref.at[self._row, pl.ds(0, LANES)], layout=self._how)
        return jnp.where(self._filled, x, jnp.asarray(empty, x.dtype))


def per_tile(rows: int, width: int) -> jax.ShapeDtypeStruct:
    """One int32 a tile, rows padded to what a warpgroup can read."""
    return jax.ShapeDtypeStruct((rows, -(-tiles(width) // 128) * 128), jnp.int32)


class Found(NamedTuple):
    """The tile that holds a point.

    index: int32. The tile.
    point: int32. What is left of the point there.
    total: int32. Weight of the row.
    """

    index: jax.Array
    point: jax.Array
    total: jax.Array


def find_tile(
    held_ref: Any,
    row: jax.Array,
    width: int,
    taker: jax.Array,
    lift: jax.Array,
    point: jax.Array,
) -> Found:
    """Finds the tile in which a point lies, a point outside the row at its end.

    Args:
      held_ref: int32[R, T] of `per_tile`, without the taker.
      row: int32.
      width: tokens of a row.
      taker: int32.
      lift: int32. What the taker holds.
      point: int32.
    """
    length = held_ref.shape[1]
    how = plgpu.Layout.WG_STRIDED((length,), vec_size=1)
    index = plgpu.broadcasted_iota(jnp.int32, (length,), 0, layout=how)
    held = plgpu.load(held_ref.at[row, pl.ds(0, length)], layout=how)
    held = jnp.where(index < tiles(width), held, 0)
    held = held + jnp.where(index == taker // TILE, lift, 0)
    total = jnp.sum(held)
    point = jnp.clip(point, 0, jnp.maximum(total - 1, 0))
    # A row without weight has its point in no tile.
    at = jnp.minimum(first_over(held, index, point), tiles(width) - 1)
    return Found(at, point - jnp.sum(jnp.where(index < at, held, 0)), total)
