"""`verify_logits` as GPU kernels, the same bits as the reference.

Four stages, each one launch: `tops` and `totals` of `pallas_kernels.weighing`, then

    sums    weights, and per tile what the residual holds
    judge   acceptance, and the residual unit that a fallen point takes

Each of the first three reads the logits once, `sums` also the draft rows; `judge`
reads one tile a row. The remainder of a row is known only when `sums` is through, so
that `sums` leaves the top token out and `judge` puts it in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic_gpu as gpu
from pallas_kernels.integer_rows import TOTAL
from pallas_kernels.mosaic_gpu import Parts, Tuning
from pallas_kernels.verify.rows import VerifiedRows, share
from pallas_kernels.weighing import Law, weighing


class _Draft(NamedTuple):
    """The draft that a row judges.

    id, offset: as given.
    is_verify: bool.
    drawn: whether its point lies in its interval of the draft row; only then does
      the draft row count.
    source: the draft row.
    """

    id: jax.Array
    offset: jax.Array
    is_verify: jax.Array
    drawn: jax.Array
    source: jax.Array

    def counted(self, q: jax.Array) -> jax.Array:
        """What of the draft row counts: a product, as no scalar selects vectors."""
        return q * self.drawn.astype(jnp.int32)


def _draft(refs: Sequence[Any], rows_ref: Any, row: jax.Array) -> _Draft:
    source_ref, id_ref, offset_ref, verify_ref = refs
    count, width = rows_ref.shape
    source = jnp.clip(source_ref[row], 0, count - 1)
    id, offset, is_verify = id_ref[row], offset_ref[row], verify_ref[row]
    inside = (id >= 0) & (id < width)
    interval = rows_ref[source, jnp.clip(id, 0, width - 1)]
    drawn = is_verify & inside & (offset >= 0) & (offset < interval)
    return _Draft(id, offset, is_verify, drawn, source)


def verify_logits(
    logits: jax.Array,
    scale: jax.Array,
    draft_rows: jax.Array,
    source: jax.Array,
    draft_ids: jax.Array,
    offsets: jax.Array,
    is_verify: jax.Array,
    points: jax.Array,
    *,
    total: int = TOTAL,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> VerifiedRows:
    """See `pallas_kernels.verify_logits`."""
    rows, vocab = logits.shape
    logits, draft_rows = gpu.padded(logits, -jnp.inf), gpu.padded(draft_rows, 0)
    tuning = tuning or gpu.default_tuning(*logits.shape)
    row_parts = weighing(logits, scale, tuning, interpret)
    law = Law(vocab, total, tuning, interpret)
    judged = (source, draft_ids, offsets, is_verify)
    held, parts = _sums(law, logits, draft_rows, row_parts, judged)
    return _judge(law, logits, draft_rows, row_parts, judged, points, held, parts)


def _sums(
    law: Law,
    logits: jax.Array,
    draft_rows: jax.Array,
    row_parts: Sequence[jax.Array],
    judged: Sequence[jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Third stage.

    Returns:
      held: int32[R, T], what a fallen point can take in each tile, without the
        taker.
      parts: int32[R, LANES] each: the sum of weights with the taker, what falls
        before the draft and what the draft row leaves of the row without it.
    """
    rows, width = logits.shape
    how = gpu.layout(logits.dtype, law.tuning)

    def verify_sums(logits_ref, draft_ref, *refs):
        held_ref, weight_ref, fallen_ref, left_ref = refs[-4:]
        row, split = lax.axis_index("row"), lax.axis_index("split")
        weigh = law.weigher(row, refs[: len(row_parts)])
        draft = _draft(refs[len(row_parts) : -4], draft_ref, row)

        def add(index, carried):
            weight, fallen, left = carried
            tile = gpu.tile_at(index, width, how)
            p = weigh(gpu.read_logits(logits_ref, row, tile, how), tile.ids)
            q = gpu.read(draft_ref, draft.source, tile, how)
            others = tile.own & (tile.ids != weigh.taker)
            counts = draft.counted(q)
            held_ref[row, index] = jnp.sum(
                jnp.where(others, jnp.maximum(p - counts, 0), 0)
            )
            before = others & (tile.ids < draft.id)
            return (
                weight + jnp.where(tile.own, p, 0),
                fallen + jnp.where(before, jnp.maximum(counts - p, 0), 0),
                left + jnp.where(others, jnp.maximum(p - q, 0), 0),
            )

        zero = gpu.constant(0, jnp.int32, how)
        sums = gpu.for_own_tiles(add, (zero,) * 3, width, law.tuning.splits)
        for ref, x in zip((weight_ref, fallen_ref, left_ref), sums, strict=True):
            ref[row, split] = jnp.sum(x)

    out = [gpu.per_tile(rows, width), *[gpu.lanes(jnp.int32, rows)] * 3]
    grid = (rows, law.tuning.splits)
    held, *parts = gpu.launch(verify_sums, out, grid, law.interpret)(
        logits, draft_rows, *row_parts, *judged
    )
    return held, tuple(parts)


def _judge(
    law: Law,
    logits: jax.Array,
    draft_rows: jax.Array,
    row_parts: Sequence[jax.Array],
    judged: Sequence[jax.Array],
    points: jax.Array,
    held: jax.Array,
    parts: Sequence[jax.Array],
) -> VerifiedRows:
    """Last stage."""
    rows, width = logits.shape
    how = gpu.layout(logits.dtype, law.tuning)

    def verify_judge(logits_ref, draft_ref, *refs):
        accept_ref, token_ref, share_ref = refs[-3:]
        points_ref, held_ref, *part_refs = refs[len(row_parts) + len(judged) : -3]
        row = lax.axis_index("row")
        weigh = law.weigher(row, refs[: len(row_parts)])
        draft = _draft(refs[len(row_parts) : len(row_parts) + 4], draft_ref, row)
        lanes = Parts(row, law.tuning.splits)
        weight, fallen, left = (jnp.sum(lanes.read(ref, 0)) for ref in part_refs)

        p_taker = weigh.of_taker(weight)
        q_taker = draft_ref[draft.source, jnp.minimum(weigh.taker, width - 1)]
        counts = draft.counted(q_taker)
        over = jnp.maximum(counts - p_taker, 0)
        fallen = fallen + jnp.where(weigh.taker < draft.id, over, 0)
        lift = jnp.maximum(p_taker - counts, 0)

        id = jnp.clip(draft.id, 0, width - 1)
        p_id = weigh(logits_ref[row, id].astype(jnp.float32), id)
        p_id = jnp.where(id == weigh.taker, p_taker, p_id)
        accept = draft.drawn & (draft.offset < p_id)
        own = jnp.where(draft.is_verify, draft.offset, points_ref[row])
        point = jnp.where(draft.drawn, fallen + draft.offset - p_id, own)

        found = gpu.find_tile(held_ref, row, width, weigh.taker, lift, point)
        tile = gpu.tile_at(found.index, width, how)
        p = weigh(gpu.read_logits(logits_ref, row, tile, how), tile.ids)
        p = jnp.where(tile.ids == weigh.taker, p_taker, p)
        q = gpu.read(draft_ref, draft.source, tile, how)
        free = jnp.maximum(p - draft.counted(q), 0)
        at = gpu.first_over(
            jnp.where(tile.own, free, 0), tile.ids - tile.start, found.point
        )
        token = jnp.where(found.total > 0, tile.start + at, -1)
        accept_ref[row] = accept | ~draft.is_verify
        token_ref[row] = jnp.where(accept, draft.id, token)
        kept = law.total - left - jnp.maximum(p_taker - q_taker, 0)
        kept = jnp.where(weigh.usable, kept, 0)
        share_ref[row] = share(kept, draft.is_verify, law.total)

    dtypes = (jnp.bool_, jnp.int32, jnp.float32)
    out = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in dtypes]
    results = gpu.launch(verify_judge, out, (rows,), law.interpret)(
        logits, draft_rows, *row_parts, *judged, points, held, *parts
    )
    return VerifiedRows(*results)
