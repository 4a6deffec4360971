"""Drawing from logits: integer rows, then the point's token."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.draw import draw
from pallas_kernels.integer_rows import TOTAL, integer_rows


class Sampled(NamedTuple):
    """Tokens drawn from `R` rows.

    ids: int32[R]. Global ids, -1 for a row without a law.
    offsets: int32[R]. How far behind the start of its token's interval each point
      lies.
    rows: int32[R, V]. The rows they were drawn from.
    """

    ids: jax.Array
    offsets: jax.Array
    rows: jax.Array


def sample_logits(
    logits: jax.Array,
    scale: jax.Array,
    points: jax.Array,
    *,
    total: int = TOTAL,
    axis_name: str | None = None,
) -> Sampled:
    """See `pallas_kernels.sample_logits`."""
    rows = integer_rows(logits, scale, total=total, axis_name=axis_name)
    return Sampled(*draw(rows, points, axis_name=axis_name), rows)
