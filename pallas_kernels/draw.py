"""Drawing a token from an integer row by inverse cumulative distribution."""

import jax

from pallas_kernels.locate import locate_offset


def draw(
    rows: jax.Array, points: jax.Array, *, axis_name: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """The token that each point falls on, ids ascending along the row.

    Of all points of [0, total), exactly `rows[r, x]` give token x. A token of weight
    zero is never returned, and a row's token does not depend on the other rows.

    Args:
      rows: int32[R, V]. Integer rows, see `integer_rows`.
      points: int32[R]. Points of [0, total), see `points`.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      (ids, offsets), int32[R] each: global ids, -1 for a row that is all zero, and
      how far behind the start of its token's interval each point lies.
    """
    return locate_offset(rows, points, axis_name)
