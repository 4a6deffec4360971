"""What a policy may look at: numbers of proposals, each with its generation."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from dspark_jax.scheduling.gate import GateState
from dspark_jax.scheduling.usual import Usual


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "logits", "live", "generation", "usual"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Offer:
    """What a proposal promised when it was made.

    Attributes:
      values: float32[B, n]. Survival of each draft; 0 where it cannot be emitted.
      logits: float32[B, n]. Confidences as the head gave them.
      live: bool[B]. Requests that were running.
      generation: int32[B]. Committed length that the proposal was made at.
      usual: float32[B, n]. What proposals promised of late, this one included, see
        `scheduling.usual`; None under policies that draft whatever it is.
    """

    values: jax.Array
    logits: jax.Array
    live: jax.Array
    generation: jax.Array
    usual: jax.Array | None = None


class NewerProposal(RuntimeError):
    """Numbers of a proposal reached a decision that must not know it."""


def require_older(offer: Offer, waiting: np.ndarray, rows: np.ndarray) -> Offer:
    """The offer, once it is sure to be older than the proposal to be verified.

    A round's total must not know the drafts that the round verifies, or tokens would
    be kept for what they are (specification of scheduling, section 8). Generations are
    compared request by request, so that a request that paused keeps its own count.

    Args:
      offer: numbers on the host.
      waiting: int[B]. Generation of the proposal that waits, or less.
      rows: bool[B]. Requests that count.

    Raises:
      NewerProposal: an offer of that generation or a later one.
    """
    newer = np.asarray(offer.generation) >= np.asarray(waiting)
    wrong = np.flatnonzero(newer & np.asarray(rows))
    if len(wrong):
        raise NewerProposal(
            f"requests {wrong.tolist()} offer proposals of generation "
            f"{np.asarray(offer.generation)[wrong].tolist()} for a decision about "
            f"{np.asarray(waiting)[wrong].tolist()}; only older ones may be looked at"
        )
    return offer


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["newest", "older", "drafted", "gate", "rounds", "usual"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Memory:
    """What a round's decision may use.

    Attributes:
      newest: of the proposal that waits for verification.
      older: of the one before it.
      drafted: bool[B]. Whether a proposal waits at all.
      gate: what the gate learned; None under other policies.
      rounds: int32[]. Rounds so far.
      usual: what `Offer.usual` follows from; None likewise.
    """

    newest: Offer
    older: Offer
    drafted: jax.Array
    gate: GateState | None
    rounds: jax.Array
    usual: Usual | None = None
