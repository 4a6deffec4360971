"""Drawing from logits, checked at the boundary."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import filters
from pallas_kernels.implementation import Implementation, run
from pallas_kernels.integer_rows import TOTAL
from pallas_kernels.sample import reference
from pallas_kernels.sample.reference import Sampled

__all__ = ["Sampled", "argmax_ids", "sample_logits"]


def sample_logits(
    logits: jax.Array,
    scale: jax.Array,
    points: jax.Array,
    *,
    total: int = TOTAL,
    implementation: Implementation | None = None,
    axis_name: str | None = None,
) -> Sampled:
    """Draws one token a row, and keeps the row: the drafter's and the plain sampler.

    Args:
      logits: float32 or bfloat16[R, V]. -inf excludes a token.
      scale: float32[R], from `scale_of`; 0 takes the argmax.
      points: int32[R]. Points of [0, total).
      total: static, 1 .. 2^30. The units of a row.
      implementation: None, "reference" or "pallas"; all give the same bits.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      Sampled.

    Raises:
      ValueError: shapes that do not belong together, or an implementation that
        cannot run here.
    """
    for name, x in (("scale", scale), ("points", points)):
        if x.shape != logits.shape[:1]:
            raise ValueError(
                f"`{name}` has shape {x.shape}; for logits {logits.shape} it must be "
                f"{logits.shape[:1]}, one entry per row"
            )

    def kernel(*args: jax.Array) -> Sampled:
        return _kernels().sample_logits(*args, total=total)

    return run(
        implementation,
        functools.partial(reference.sample_logits, total=total),
        kernel,
        logits,
        scale,
        points,
        axis_name=axis_name,
    )


def argmax_ids(
    logits: jax.Array,
    *,
    implementation: Implementation | None = None,
    axis_name: str | None = None,
) -> jax.Array:
    """Token of the largest logit, the lowest id on ties.

    Args:
      logits: float32 or bfloat16[R, V].
      implementation: as for `sample_logits`.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      int32[R], global ids; -1 for a row that holds NaN or +inf or nothing but -inf.

    Raises:
      ValueError: an implementation that cannot run here.
    """

    def kernel(x: jax.Array) -> jax.Array:
        return _kernels().argmax_ids(x)

    return run(implementation, filters.argmax_ids, kernel, logits, axis_name=axis_name)


def _kernels():
    # Older JAX than the kernels need must be able to import this module.
    from pallas_kernels.sample import pallas_mosaic_gpu

    return pallas_mosaic_gpu
