"""What a request's proposals usually promise, so that a round may go without one.

A mean of survivals in which a proposal counts 7/8 of the one after it. It stays as it
is while nothing is drafted.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

# A power of two: taking that share off rounds once, however it is compiled.
FORGET = 0.125


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["sums", "weight"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Usual:
    """Weighted sums of survivals.

    Attributes:
      sums: float32[B, n].
      weight: float32[B]. Of the proposals in them, below 8.
    """

    sums: jax.Array
    weight: jax.Array


def nothing_usual(batch: int, drafts: int) -> Usual:
    """Before the first proposal."""
    return Usual(jnp.zeros((batch, drafts)), jnp.zeros((batch,)))


def add_proposal(usual: Usual, values: jax.Array, counts: jax.Array) -> Usual:
    """Takes in a proposal.

    Args:
      usual: before it.
      values: float32[B, n]. Survival of each draft.
      counts: bool[B]. Requests for which it was made.
    """
    sums = usual.sums - usual.sums * FORGET + values
    weight = usual.weight - usual.weight * FORGET + 1.0
    return Usual(
        jnp.where(counts[:, None], sums, usual.sums),
        jnp.where(counts, weight, usual.weight),
    )


def usual_values(usual: Usual) -> jax.Array:
    """float32[B, n]: the means; 1 for a request without a proposal so far."""
    # A compiler that sees one divisor for a whole row multiplies by its reciprocal.
    weight = jnp.broadcast_to(usual.weight[:, None], usual.sums.shape)
    weight = lax.optimization_barrier(jnp.maximum(weight, 1.0))
    return jnp.where(usual.weight[:, None] > 0, usual.sums / weight, 1.0)
