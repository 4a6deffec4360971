"""How many rows each request has in the next round, by the policy.

    round r     verifies the proposal made in r - 1, `newest` here
                makes the next one, which becomes `newest`; `newest` becomes `older`

`Budget` takes the total of round r from `older` and divides it by `newest`, and from
`older` it says whether round r drafts. So a host that knows the results of round r - 2
can say how wide round r is while r - 1 still runs.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.scheduling import gate
from dspark_jax.scheduling.arrays import library
from dspark_jax.scheduling.budget import Array, choose_total, share
from dspark_jax.scheduling.cost_model import CostTable
from dspark_jax.scheduling.early_stop import early_stop
from dspark_jax.scheduling.memory import Memory, Offer
from dspark_jax.scheduling.policy import Budget, EarlyStop, Gate, Scheduled, Threshold
from dspark_jax.scheduling.reprobe import is_probe, probe_period
from dspark_jax.scheduling.usual import add_proposal, nothing_usual, usual_values


def first_memory(policy: Scheduled, newest: Offer) -> Memory:
    """Before the first round: no proposal came before, its survivals count as 1."""
    batch = newest.live.shape[0]
    learned = usual = None
    if isinstance(policy, Gate):
        learned = gate.gate_start(policy.config, batch)
    older = dataclasses.replace(newest, values=jnp.ones_like(newest.values))
    if isinstance(policy, Budget):
        usual = nothing_usual(*newest.values.shape)
        older = dataclasses.replace(older, usual=older.values)
    drafted, none = jnp.ones((batch,), bool), jnp.int32(0)
    memory = Memory(older, older, drafted, learned, none, usual)
    return with_offer(memory, newest, jnp.bool_(True))


def with_offer(memory: Memory, offer: Offer, drafts: jax.Array) -> Memory:
    """The memory once the next proposal was made, or not.

    Args:
      memory: before.
      offer: of the proposal; without one, of what it would have been for.
      drafts: bool[]. Whether there is one. If not, and somebody may ask for its promise
        later, that is what is usual.
    """
    usual = memory.usual
    if usual is not None:
        usual = add_proposal(usual, offer.values, offer.live & drafts)
        # Drafts that could not be emitted stay worthless.
        means = jnp.where(offer.values > 0, usual_values(usual), 0.0)
        values = jnp.where(drafts, offer.values, means)
        offer = dataclasses.replace(offer, values=values, usual=means)
    return dataclasses.replace(
        memory,
        newest=offer,
        older=memory.newest,
        drafted=jnp.broadcast_to(drafts, memory.drafted.shape),
        usual=usual,
    )


def total_of(offer: Offer, costs: CostTable) -> Array:
    """int32[]: rows of the round after next, from what a proposal promises.

    The same on the host and in a program; see `scheduling.budget`.
    """
    fixed = costs.fixed_ms(offer.live.sum(dtype=jnp.int32))
    total, _ = choose_total(offer.values, offer.live, costs.curve, costs.slope, fixed)
    return total


def draft_pays(offer: Offer, costs: CostTable, rounds: Array) -> Array:
    """bool[]: whether `Budget` drafts, from a proposal's promise and those before it.

    Weighs tokens a millisecond with what drafts usually promise, the time of a proposal
    included, against one token a request in a round without. Every so often it drafts
    all the same, see `reprobe`.

    Args:
      offer: older than the proposal that waits.
      costs: measured times.
      rounds: int32[]. Rounds so far, the one that would draft included.
    """
    assert offer.usual is not None
    count = offer.live.sum(dtype=jnp.int32)
    fixed = costs.fixed_ms(count)
    _, speed = choose_total(offer.usual, offer.live, costs.curve, costs.slope, fixed)
    n = offer.values.shape[1]
    period = probe_period(_gate_costs(costs, offer.live, n), n)
    plain = count.astype(jnp.float32) / costs.plain_ms(count)
    return (speed >= plain) | is_probe(rounds, period)


def lengths(
    policy: Scheduled,
    costs: CostTable | None,
    memory: Memory,
    live: jax.Array,
    drawn: bool,
    total: jax.Array | None = None,
) -> jax.Array:
    """Rows of each request in this round.

    Args:
      policy: static.
      costs: measured times; None for a policy that weighs none.
      memory: what may be looked at.
      live: bool[B]. Requests that are running.
      drawn: static; whether tokens are drawn at a temperature, so that a decision must
        not look ahead of the draft it is about.
      total: int32[]. Rows of the round where `Budget` decided before; None: now.

    Returns:
      int32[B]: 1 and the drafts to verify, 0 for a request that has ended.
    """
    offer = memory.newest
    values = jnp.where(memory.drafted[:, None], offer.values, 0.0)
    most = jnp.sum(values > 0, axis=1, dtype=jnp.int32)
    if isinstance(policy, Budget):
        rows = _total(costs, memory) if total is None else total
        drafts = share(values, live, rows) - 1
    elif isinstance(policy, EarlyStop):
        assert costs is not None
        sizes = values.size + len(live) + 1
        times = costs.ms_by_total(jnp.sum(live, dtype=jnp.int32), sizes)
        drafts = early_stop(values, live, times)
    elif isinstance(policy, Threshold):
        drafts = jnp.sum(values >= policy.survival, axis=1, dtype=jnp.int32)
    else:
        drafts = _gated(policy, costs, memory, drawn)
    return jnp.where(live, 1 + jnp.minimum(drafts, most), 0)


def wants_draft(
    policy: Scheduled,
    costs: CostTable | None,
    memory: Memory,
    doubt: jax.Array | None,
) -> jax.Array:
    """Requests for which a next proposal is expected to pay.

    Depends on committed tokens, on counts of earlier rounds and on proposals of which
    no draft waits any more.

    Args:
      policy: static.
      costs: measured times.
      memory: after the round.
      doubt: float32[B]. Distance of the two highest target logits in the row that the
        anchor came from; None unless the policy minds.

    Returns:
      bool[B].
    """
    batch, draft_length = memory.newest.values.shape
    if isinstance(policy, Budget):
        assert costs is not None
        return jnp.broadcast_to(draft_pays(memory.older, costs, memory.rounds), batch)
    if not isinstance(policy, Gate):
        return jnp.ones((batch,), bool)
    assert memory.gate is not None
    times = _gate_costs(costs, memory.newest.live, draft_length)
    expected = jnp.broadcast_to(
        gate.gate_mean_rate(memory.gate)[:, None], (batch, draft_length)
    )
    speed = gate.gate_speed(policy.config, expected, times)
    pays = speed[:, 1:].max(axis=1) * times.plain_ms > 1.0
    pays |= is_probe(memory.rounds, probe_period(times, draft_length))
    if policy.least_margin and doubt is not None:
        pays &= gate.margin_gate(doubt, policy.least_margin)
    return pays


def remember(
    policy: Scheduled, memory: Memory, rows: jax.Array, kept: jax.Array
) -> Memory:
    """The memory after a round, but for the next proposal.

    Args:
      policy: static.
      memory: before it.
      rows: int32[B]. Rows of each request.
      kept: int32[B]. Accepted drafts.
    """
    learned = memory.gate
    if isinstance(policy, Gate) and learned is not None:
        # A round without drafts says nothing about drafts, and probes bring them
        # back: counts stay as they are.
        learned = gate.gate_update(
            policy.config,
            learned,
            memory.newest.logits,
            jnp.maximum(rows - 1, 0),
            kept,
            memory.drafted & (rows > 0),
        )
    return dataclasses.replace(memory, gate=learned, rounds=memory.rounds + 1)


def _total(costs: CostTable | None, memory: Memory) -> jax.Array:
    assert costs is not None
    return total_of(memory.older, costs)


def _gated(
    policy: Gate, costs: CostTable | None, memory: Memory, drawn: bool
) -> jax.Array:
    assert memory.gate is not None
    rates = gate.gate_rates(policy.config, memory.gate, memory.newest.logits)
    n = rates.shape[1]
    times = _gate_costs(costs, memory.newest.live, n)
    causal = drawn if policy.causal is None else policy.causal
    if causal:
        ahead = gate.gate_mean_rate(memory.gate)
        return gate.gate_decide_causal(policy.config, rates, times, ahead)
    return gate.gate_decide(policy.config, rates, times)


def _gate_costs(costs: CostTable | None, live: jax.Array, n: int) -> gate.GateCosts:
    """Times of a round in which all requests do alike; only ratios matter."""
    assert costs is not None
    xp = library(live, costs.curve.ms)
    count = xp.maximum(live.sum(dtype=xp.int32), xp.int32(1))
    rows = count * (1 + xp.arange(n + 1, dtype=xp.int32))
    with_drafts = costs.fixed_ms(count) - costs.fixed_ms(count, False)
    times = costs.round_ms(count, rows, drafts=False)
    return gate.GateCosts(with_drafts, times, costs.plain_ms(count))
