"""Drawing a token from a row of weights by inverse cumulative distribution."""

import jax
import jax.numpy as jnp

from pallas_kernels.locate import locate_in_tiles
from pallas_kernels.vocab_axis import as_tiles, fold


def draw(probs: jax.Array, u: jax.Array, *, axis_name: str | None = None) -> jax.Array:
    """Draws one token per row, ids ascending along the unit interval.

    The point is `u` times the row's total, so the row need not be normalised. A
    token of probability zero is never returned, and a row's token does not depend
    on the other rows.

    Args:
      probs: float32[R, V]. Weights >= 0.
      u: float32[R]. Numbers in [0, 1).
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      int32[R], global ids; -1 for a row whose total is zero or NaN.
    """
    tiles = as_tiles(probs)
    sums = fold(tiles)
    total = fold(sums)
    if axis_name is not None:
        total = jax.lax.psum(total, axis_name)
    width = probs.shape[1]
    token, _ = locate_in_tiles(tiles, sums, u * total, width, axis_name)
    return jnp.where(total > 0, token, -1)
