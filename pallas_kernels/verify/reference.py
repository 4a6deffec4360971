"""The acceptance rule on integer rows: exact, with one random point a position.

Both rows sum to the same total S. A draft x was drawn by a point of [0, S), which
lies `offset` behind the start of x's interval in q:

    q      |----- x: q_x -----|
           0     offset      q_x        stands where offset < p_x
                 ^^^^^^

The points whose draft falls are those with offset >= p_y, q_y - p_y of them for every
token y with q_y > p_y. As both rows sum to S, they are as many as the units of the
residual max(p - q, 0). The k-th of them, in the order of tokens and offsets, takes
the k-th unit of the residual. So a position maps [0, S) onto itself one to one: the
token's law is p exactly, and no second random number is needed.

Chen et al. 2023, algorithm 2, is what this comes to when rows are real numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.integer_rows import TOTAL, integer_rows
from pallas_kernels.locate import locate
from pallas_kernels.verify.rows import VerifiedRows, share
from pallas_kernels.vocab_axis import row_sum, take, token_ids


def verify_rows(
    p: jax.Array,
    q: jax.Array,
    draft_ids: jax.Array,
    offsets: jax.Array,
    is_verify: jax.Array,
    points: jax.Array,
    *,
    total: int = TOTAL,
    axis_name: str | None = None,
) -> VerifiedRows:
    """See `pallas_kernels.verify_rows`."""
    p_x, q_x = take(p, draft_ids, axis_name), take(q, draft_ids, axis_name)
    drawn = is_verify & (offsets >= 0) & (offsets < q_x)
    accept = drawn & (offsets < p_x)

    # What falls before x, then what falls of x before this point.
    before = token_ids(p.shape[1], axis_name) < draft_ids[:, None]
    fallen = jnp.where(before, jnp.maximum(q - p, 0), 0)
    rank = row_sum(fallen, axis_name) + offsets - p_x
    source = jnp.where(drawn[:, None], jnp.maximum(p - q, 0), p)
    own = jnp.where(is_verify, offsets, points)
    point = jnp.where(drawn, jnp.maximum(rank, 0), own)
    token = locate(source, point, axis_name)

    kept = row_sum(jnp.minimum(p, q), axis_name)
    token = jnp.where(accept, draft_ids, token)
    kept = share(kept, is_verify, total)
    return VerifiedRows(accept | ~is_verify, token, kept)


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
    axis_name: str | None = None,
) -> VerifiedRows:
    """See `pallas_kernels.verify_logits`."""
    p = integer_rows(logits, scale, total=total, axis_name=axis_name)
    q = jnp.take(draft_rows, source, axis=0, mode="clip")
    return verify_rows(
        p, q, draft_ids, offsets, is_verify, points, total=total, axis_name=axis_name
    )


def judge_greedy(
    best: jax.Array, draft_ids: jax.Array, is_verify: jax.Array
) -> VerifiedRows:
    """Verdicts from the argmax of every row; see `pallas_kernels.verify_greedy`."""
    accept = ((draft_ids == best) & (best >= 0)) | ~is_verify
    return VerifiedRows(accept, best, accept.astype(jnp.float32))
