"""Allocation, checked at the boundary. O(requests x drafts) numbers: plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.allocate import reference


def survival(confidence: jax.Array) -> jax.Array:
    """Chance that a draft is reached and kept: products of confidences.

    Args:
      confidence: float32[B, n]. Chance that draft j is kept once those before it were.

    Returns:
      float32[B, n], never rising along a row of values in [0, 1].

    Raises:
      ValueError: not float32[B, n].
    """
    _require_values("confidence", confidence)
    return reference.survival(confidence)


def carried(values: jax.Array, source: jax.Array) -> jax.Array:
    """Values of an earlier batch for the requests of this one.

    Args:
      values: float32[P, n]. Of the earlier batch.
      source: int32[B]. Each request's row there; -1 where it had none.

    Returns:
      float32[B, n]; 0 for a request without a row.

    Raises:
      ValueError: not float32[P, n].
    """
    _require_values("values", values)
    rows = jnp.take(values, jnp.maximum(source, 0), axis=0, mode="clip")
    return jnp.where((source >= 0)[:, None], rows, 0.0)


def allocate(values: jax.Array, total: jax.Array | int) -> jax.Array:
    """Rows of each request when `total` rows are shared by value.

    Every request has one row. What is left goes to drafts in the order of their
    values, equal ones by request and then by position. Values that never rise along a
    row, as survivals do, give every request a prefix of its drafts. A value of 0 takes
    part: a surplus is spent on it, in flat order.

    Args:
      values: float32[B, n]. Survival of each draft; no NaN.
      total: int32[], or a number. Rows of the round; below `B` counts as `B`.

    Returns:
      int32[B] in 1 .. n + 1. Their sum is `total`, if that is within B .. B (n + 1).

    Raises:
      ValueError: not float32[B, n].
    """
    _require_values("values", values)
    return reference.allocate(values, jnp.asarray(total, jnp.int32))


def _require_values(name: str, x: jax.Array) -> None:
    if x.ndim != 2 or x.dtype != jnp.float32:
        raise ValueError(
            f"`{name}` is {x.dtype}{list(x.shape)}; it must be float32[B, n]"
        )
