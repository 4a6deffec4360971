"""How many rows each request has in the next round, decided from its state.

    round r     verifies the proposal made in r - 1, `newest` here
                makes the next one, which becomes `newest`; `newest` becomes `older`

`Budget` takes the total of round r from `older` and divides it by `newest`, so that a
host that knows the results of round r - 2 can say how wide round r is while r - 1 still
runs. The numbers of a proposal are written down when it is made, with what its
request could still emit then: that, too, the host knows in time.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.decoding.requests import Variant, holds_rows
from dspark_jax.decoding.state import RUNNING, DecodeState
from dspark_jax.models.draft.proposal import Proposal
from dspark_jax.scheduling import gate
from dspark_jax.scheduling.budget import choose_total, share
from dspark_jax.scheduling.cost_model import CostTable
from dspark_jax.scheduling.early_stop import early_stop
from dspark_jax.scheduling.memory import Memory, Offer
from dspark_jax.scheduling.policy import Budget, EarlyStop, Gate, Scheduled, Threshold
from dspark_jax.scheduling.reprobe import is_probe, probe_period
from dspark_jax.spec import Spec
from pallas_kernels.allocate import survival


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["costs", "total"],
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
    """

    costs: CostTable | None
    total: jax.Array | None
    policy: Scheduled
    buckets: tuple[int, ...]


def with_memory(spec: Spec, policy: Scheduled, state: DecodeState) -> DecodeState:
    """A state behind its prefill, ready for rounds that decide by `policy`.

    There is no proposal before the first: its survivals count as 1.
    """
    assert state.proposal is not None
    newest = offered(spec, state, state.proposal)
    older = dataclasses.replace(newest, values=jnp.ones_like(newest.values))
    batch = state.anchor.shape[0]
    learned = None
    if isinstance(policy, Gate):
        learned = gate.gate_start(policy.config, batch)
    memory = Memory(newest, older, jnp.ones((batch,), bool), learned, jnp.int32(0))
    return dataclasses.replace(state, memory=memory)


def offered(spec: Spec, state: DecodeState, proposal: Proposal) -> Offer:
    """What a proposal promises: survival of each draft that could be emitted.

    A request that may emit m more tokens uses m - 1 drafts at most, as the target
    itself adds one.
    """
    assert spec.draft is not None
    n = proposal.confidence.shape[1]
    heat = spec.draft.confidence_temperatures
    scaled = proposal.confidence
    if heat is not None:
        scaled = scaled / jnp.asarray(heat[:n], jnp.float32)
    values = survival(jnp.nan_to_num(jax.nn.sigmoid(scaled)))
    live = state.finish == RUNNING
    room = jnp.minimum(state.budget, state.capacity - state.length - 1)
    usable = jnp.arange(1, n + 1, dtype=jnp.int32)[None] < room[:, None]
    values = jnp.where(usable & live[:, None], values, 0.0)
    return Offer(values, proposal.confidence, live, proposal.generation)


def total_of(offer: Offer, costs: CostTable) -> jax.Array:
    """int32[]: rows of the round after next, from what a proposal promises.

    The same on the host and in a program; see `scheduling.budget`.
    """
    fixed = costs.fixed_ms(jnp.sum(offer.live, dtype=jnp.int32))
    total, _ = choose_total(offer.values, offer.live, costs.curve, costs.slope, fixed)
    return total


def total_on_host(offer: Offer, costs: CostTable) -> int:
    """`total_of` of numpy arrays, beside what the accelerator is doing."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return int(_total_on_host(offer, costs))


_total_on_host = jax.jit(total_of)


def lengths(
    plan: Plan, memory: Memory, state: DecodeState, variant: Variant
) -> jax.Array:
    """int32[B]: rows of each request in this round, 0 where it has ended."""
    offer, policy = memory.newest, plan.policy
    live = state.finish == RUNNING
    values = jnp.where(memory.drafted[:, None], offer.values, 0.0)
    most = jnp.sum(values > 0, axis=1, dtype=jnp.int32)
    if isinstance(policy, Budget):
        drafts = share(values, live, _total(plan, memory)) - 1
    elif isinstance(policy, EarlyStop):
        drafts = _early_stop(plan, values, live)
    elif isinstance(policy, Threshold):
        drafts = jnp.sum(values >= policy.survival, axis=1, dtype=jnp.int32)
    else:
        drafts = _gated(policy, plan, memory, variant)
    return jnp.where(live, 1 + jnp.minimum(drafts, most), 0)


def wants_draft(
    plan: Plan, memory: Memory, doubt: jax.Array | None, draft_length: int
) -> jax.Array:
    """bool[B]: requests for which a next proposal is expected to pay.

    Depends on committed tokens and on counts of earlier rounds only.
    """
    policy, batch = plan.policy, memory.drafted.shape[0]
    if not isinstance(policy, Gate):
        return jnp.ones((batch,), bool)
    assert memory.gate is not None
    costs = _gate_costs(plan, memory.newest.live, draft_length)
    expected = jnp.broadcast_to(
        gate.gate_mean_rate(memory.gate)[:, None], (batch, draft_length)
    )
    speed = gate.gate_speed(policy.config, expected, costs)
    pays = speed[:, 1:].max(axis=1) * costs.plain_ms > 1.0
    pays |= is_probe(memory.rounds, probe_period(costs, draft_length))
    if policy.least_margin and doubt is not None:
        pays &= gate.margin_gate(doubt, policy.least_margin)
    return pays


def remember(plan: Plan, memory: Memory, rows: jax.Array, kept: jax.Array) -> Memory:
    """The memory after a round, but for the next proposal.

    Args:
      plan: of the round.
      memory: before it.
      rows: int32[B]. Rows of each request.
      kept: int32[B]. Accepted drafts.
    """
    learned = memory.gate
    if isinstance(plan.policy, Gate) and learned is not None:
        # A round without drafts says nothing about drafts, and probes bring them
        # back: counts stay as they are.
        learned = gate.gate_update(
            plan.policy.config,
            learned,
            memory.newest.logits,
            jnp.maximum(rows - 1, 0),
            kept,
            memory.drafted & (rows > 0),
        )
    return dataclasses.replace(memory, gate=learned, rounds=memory.rounds + 1)


def _total(plan: Plan, memory: Memory) -> jax.Array:
    if plan.total is not None:
        return plan.total
    assert plan.costs is not None
    return total_of(memory.older, plan.costs)


def _gated(policy: Gate, plan: Plan, memory: Memory, variant: Variant) -> jax.Array:
    assert memory.gate is not None
    rates = gate.gate_rates(policy.config, memory.gate, memory.newest.logits)
    n = rates.shape[1]
    costs = _gate_costs(plan, memory.newest.live, n)
    causal = holds_rows(variant) if policy.causal is None else policy.causal
    if causal:
        ahead = gate.gate_mean_rate(memory.gate)
        return gate.gate_decide_causal(policy.config, rates, costs, ahead)
    return gate.gate_decide(policy.config, rates, costs)


def _gate_costs(plan: Plan, live: jax.Array, n: int) -> gate.GateCosts:
    """Times of a round in which all requests do alike; only ratios matter."""
    assert plan.costs is not None
    count = jnp.maximum(jnp.sum(live, dtype=jnp.int32), 1)
    rows = count * (1 + jnp.arange(n + 1, dtype=jnp.int32))
    one = functools.partial(plan.costs.round_ms, count, drafts=False)
    with_drafts = plan.costs.fixed_ms(count) - plan.costs.fixed_ms(count, False)
    return gate.GateCosts(with_drafts, jax.vmap(one)(rows), plan.costs.plain_ms(count))


def _early_stop(plan: Plan, values: jax.Array, live: jax.Array) -> jax.Array:
    assert plan.costs is not None
    totals = values.size + len(live) + 1
    return early_stop(values, live, plan.costs.ms_by_total(jnp.sum(live), totals))
