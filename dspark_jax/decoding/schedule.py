"""What a round's lengths follow from: a policy's plan, and proposals on offer.

The numbers of a proposal are written down when it is made, with what its request could
still emit then: so the host, which learns them a round late, sees what the device sees.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config_draft import DraftConfig
from dspark_jax.decoding.requests import Requests
from dspark_jax.decoding.state import RUNNING, DecodeState
from dspark_jax.models.draft.proposal import Proposal
from dspark_jax.scheduling.cost_model import CostTable
from dspark_jax.scheduling.decide import draft_pays, first_memory, total_of
from dspark_jax.scheduling.memory import Offer
from dspark_jax.scheduling.policy import Scheduled
from dspark_jax.settings import GREEDY_BELOW
from dspark_jax.spec import Spec
from pallas_kernels.allocate import survival


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["costs", "total", "drafts"],
    meta_fields=["policy", "buckets"],
)
@dataclass(frozen=True)
class Plan:
    """What a round needs to decide.

    Attributes:
      costs: measured times; None for policies that weigh none.
      total: int32[]. Rows of the round, chosen by the host; None: chosen here.
      policy: static.
      buckets: static row counts that the round may be evaluated in, increasing.
      drafts: bool[]. Whether the round makes a proposal, given with the total.
    """

    costs: CostTable | None
    total: jax.Array | None
    policy: Scheduled
    buckets: tuple[int, ...]
    drafts: jax.Array | None = None


def with_memory(
    spec: Spec, policy: Scheduled, state: DecodeState, requests: Requests
) -> DecodeState:
    """A state behind its prefill, ready for rounds that decide by `policy`."""
    assert state.proposal is not None
    offer = offered(spec, state, state.proposal, requests)
    memory = first_memory(policy, offer)
    return dataclasses.replace(state, memory=memory)


def offered(
    spec: Spec, state: DecodeState, proposal: Proposal, requests: Requests
) -> Offer:
    """What a proposal promises: survival of each draft that could be emitted.

    A calibration counts for what it was made for: greedy requests, or those that draw.
    Others have the head's own word. A request that may emit m more tokens uses m - 1
    drafts at most, as the target itself adds one.
    """
    assert spec.draft is not None
    n = proposal.confidence.shape[1]
    chances = jax.nn.sigmoid(proposal.confidence)
    if spec.draft.calibrated_at is not None:
        fits = (requests.scale == 0) == (spec.draft.calibrated_at < GREEDY_BELOW)
        fitted = confidences(spec.draft, proposal.confidence)
        chances = jnp.where(fits[:, None], fitted, chances)
    values = survival(jnp.nan_to_num(chances))
    live = state.finish == RUNNING
    room = jnp.minimum(state.budget, state.capacity - state.length - 1)
    usable = jnp.arange(1, n + 1, dtype=jnp.int32)[None] < room[:, None]
    values = jnp.where(usable & live[:, None], values, 0.0)
    return Offer(values, proposal.confidence, live, proposal.generation)


def confidences(draft: DraftConfig, logits: jax.Array) -> jax.Array:
    """Chances that drafts stand once those before them did, as calibrated.

    sigmoid((logit + b) / T) by position; `scheduling.calibrated` of numpy arrays.

    Args:
      draft: with temperatures and shifts, or without.
      logits: float32[B, n] of the head, n <= gamma.

    Returns:
      float32[B, n] in [0, 1]; NaN where a logit is.
    """
    n, scaled = logits.shape[1], logits
    if draft.confidence_shifts is not None:
        scaled = scaled + _row(draft.confidence_shifts[:n])
    if draft.confidence_temperatures is not None:
        scaled = scaled / _row(draft.confidence_temperatures[:n])
    return jax.nn.sigmoid(scaled)


def _row(values: tuple[float, ...]) -> jax.Array:
    return jnp.asarray(values, jnp.float32)[None]


def choose_on_host(offer: Offer, costs: CostTable, rounds: int) -> tuple[int, bool]:
    """`total_of` and `draft_pays` of numpy arrays, while a round is in flight.

    In numpy: what one thread launches on a CPU runs in that order, and a program would
    wait for the round that is meant to hide it.
    """
    total, drafts = total_of(offer, costs), draft_pays(offer, costs, np.int32(rounds))
    return int(total), bool(drafts)
