"""`sample_logits` and `argmax_ids` as GPU kernels, the same bits as the reference.

Drawing takes four stages, each one launch: `tops` and `totals` of
`pallas_kernels.weighing`, then

    sums    weights of every tile, without the top token
    write   the weights, and the token of the point

An argmax takes `tops` and one launch that compares what its blocks found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_gpu as gpu
from pallas_kernels.integer_rows import TOTAL
from pallas_kernels.mosaic_gpu import Parts, Tuning
from pallas_kernels.sample.reference import Sampled
from pallas_kernels.weighing import Law, row_top, tops, weighing


def sample_logits(
    logits: jax.Array,
    scale: jax.Array,
    points: jax.Array,
    *,
    total: int = TOTAL,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> Sampled:
    """See `pallas_kernels.sample_logits`."""
    vocab = logits.shape[1]
    logits = gpu.padded(logits, -jnp.inf)
    tuning = tuning or gpu.default_tuning(*logits.shape)
    law = Law(vocab, total, tuning, interpret)
    row_parts = weighing(logits, scale, tuning, interpret)
    held, weight = _sums(law, logits, row_parts)
    ids, offsets, rows = _write(law, logits, row_parts, points, held, weight)
    return Sampled(ids, offsets, rows[:, :vocab])


def _sums(
    law: Law, logits: jax.Array, row_parts: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Third stage: int32[R, T] a tile without the taker, int32[R, LANES] with it."""
    rows, width = logits.shape
    how = gpu.layout(logits.dtype, law.tuning)

    def sample_sums(logits_ref, *refs):
        held_ref, weight_ref = refs[-2:]
        row, split = lax.axis_index("row"), lax.axis_index("split")
        weigh = law.weigher(row, refs[:-2])

        def add(index, weight):
            tile = gpu.tile_at(index, width, how)
            p = weigh(gpu.read_logits(logits_ref, row, tile, how), tile.ids)
            p = jnp.where(tile.own, p, 0)
            others = jnp.where(tile.ids != weigh.taker, p, 0)
            held_ref[row, index] = jnp.sum(others)
            return weight + p

        zero = gpu.constant(0, jnp.int32, how)
        weight = gpu.for_own_tiles(add, zero, width, law.tuning.splits)
        weight_ref[row, split] = jnp.sum(weight)

    out = [gpu.per_tile(rows, width), gpu.lanes(jnp.int32, rows)]
    grid = (rows, law.tuning.splits)
    held, weight = gpu.launch(sample_sums, out, grid, law.interpret)(logits, *row_parts)
    return held, weight


def _write(
    law: Law,
    logits: jax.Array,
    row_parts: Sequence[jax.Array],
    points: jax.Array,
    held: jax.Array,
    weight: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Last stage: (ids int32[R], offsets int32[R], weights int32[R, V])."""
    rows, width = logits.shape
    how = gpu.layout(logits.dtype, law.tuning)

    def sample_write(logits_ref, *refs):
        points_ref, held_ref, weight_ref, id_ref, offset_ref, rows_ref = refs[-6:]
        row = lax.axis_index("row")
        weigh = law.weigher(row, refs[:-6])
        lanes = Parts(row, law.tuning.splits)
        p_taker = weigh.of_taker(jnp.sum(lanes.read(weight_ref, 0)))
        found = gpu.find_tile(
            held_ref, row, width, weigh.taker, p_taker, points_ref[row]
        )

        def write(index, carried):
            tile = gpu.tile_at(index, width, how)
            p = weigh(gpu.read_logits(logits_ref, row, tile, how), tile.ids)
            p = jnp.where(tile.ids == weigh.taker, p_taker, p)
            rows_ref[row, pl.ds(tile.start, gpu.TILE)] = p

            @pl.when(index == found.index)
            def _():
                own = jnp.where(tile.own, p, 0)
                column = tile.ids - tile.start
                at = gpu.first_over(own, column, found.point)
                before = jnp.sum(jnp.where(column < at, own, 0))
                has = found.total > 0
                id_ref[row] = jnp.where(has, tile.start + at, -1)
                rest = jnp.where(has, found.point - before, points_ref[row])
                offset_ref[row] = jnp.maximum(rest, 0)

            return carried

        gpu.for_own_tiles(write, jnp.int32(0), width, law.tuning.splits)

    vector = jax.ShapeDtypeStruct((rows,), jnp.int32)
    out = [vector, vector, jax.ShapeDtypeStruct((rows, width), jnp.int32)]
    grid = (rows, law.tuning.splits)
    ids, offsets, weights = gpu.launch(sample_write, out, grid, law.interpret)(
        logits, *row_parts, points, held, weight
    )
    return ids, offsets, weights


def argmax_ids(
    logits: jax.Array, *, tuning: Tuning | None = None, interpret: Any = None
) -> jax.Array:
    """See `pallas_kernels.argmax_ids`."""
    logits = gpu.padded(logits, -jnp.inf)
    rows = logits.shape[0]
    tuning = tuning or gpu.default_tuning(*logits.shape)

    def row_best(top_ref, first_ref, id_ref):
        row = lax.axis_index("row")
        top, first = row_top(Parts(row, tuning.splits), top_ref, first_ref)
        id_ref[row] = jnp.where(jnp.abs(top) < jnp.inf, first, -1)

    out = [jax.ShapeDtypeStruct((rows,), jnp.int32)]
    parts = tops(logits, tuning, interpret)
    return gpu.launch(row_best, out, (rows,), interpret)(*parts)[0]
