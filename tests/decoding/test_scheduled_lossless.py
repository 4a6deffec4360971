"""The law of what is emitted when confidences decide what is verified.

Every random word of a prefill and its rounds is enumerated through the serving code.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding import schedule
from dspark_jax.decoding.schedule import Plan
from dspark_jax.scheduling import decide
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostTable
from dspark_jax.scheduling.gate import GateConfig, GateState
from dspark_jax.scheduling.memory import Offer
from dspark_jax.scheduling.policy import Budget, EarlyStop, Gate, Threshold
from tests.decoding.enumeration import chain, completed, enumerate_law

THIRDS = (
    np.asarray([[1, 2, 0], [1, 1, 1], [0, 1, 2]]) / 3,
    np.asarray([[2, 0, 1], [1, 1, 1], [1, 2, 0]]) / 3,
)
# The draft is sure of itself after token 1 and doubts after token 0, so that the second
# draft's confidence tells which token the first one is.
CONFIDENCE = np.asarray([-2.0, 2.0, 0.2], np.float32)
# A gate that tells the three confidences apart, and what it has learned of them.
CONFIG = GateConfig(edges=(-1.0, 1.0), margin=1.0, skip_pays_draft=False)
LEARNED = GateState(jnp.asarray([[1.0, 40.0, 80.0]]), jnp.asarray([[99.0, 79.0, 80.0]]))
N = 2


def costs(*ms):
    """Of 1, 2 and 3 rows."""
    zeros = np.zeros(2, np.float32)
    return CostTable(curve([1, 2, 3], ms), np.float32(0), zeros, zeros)


# Two rows cost as much as three: it is both drafts or none.
CLIFF = costs(10.0, 20.0, 21.0)
# The first draft pays after tokens 1 and 2, the second after token 1 only.
RISING = costs(10.0, 13.0, 17.0)


def far_off(policy, costs, rounds):
    """Largest error of the law of all emitted tokens."""
    with np.errstate(divide="ignore"):
        logs = [np.log(table) for table in THIRDS]
    model = dspark.testing.scripted_model(*logs, gamma=N, confidence=CONFIDENCE)
    plan = Plan(costs, None, policy, (2, 3))
    learned = LEARNED if isinstance(policy, Gate) else None
    law = enumerate_law(model, N, rounds, 3, plan=plan, learned=learned)
    assert abs(sum(law.values()) - 1) < 1e-9
    length = 1 + rounds * (N + 1)
    assert len({len(tokens) for tokens in law}) > 1
    return np.abs(completed(law, THIRDS[0], length) - chain(THIRDS[0], length)).max()


# A budget's total comes from the proposal before the one it divides: two rounds.
CASES = {
    "budget": (Budget(), CLIFF, 2),
    "early_stop": (EarlyStop(), RISING, 1),
    "threshold": (Threshold(survival=0.3), None, 1),
    "gate": (Gate(config=CONFIG), CLIFF, 1),
}


@pytest.mark.parametrize(
    "name",
    [
        "budget",
        *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "budget"),
    ],
)
def test_a_policy_keeps_the_law(name):
    assert far_off(*CASES[name]) < 1e-9


def test_control_a_total_from_the_drafts_it_is_for(monkeypatch):
    """The second confidence would decide whether the first draft is verified."""
    real = decide._total

    def retrospective(costs, memory):
        return real(costs, dataclasses.replace(memory, older=memory.newest))

    monkeypatch.setattr(decide, "_total", retrospective)
    assert far_off(Budget(), CLIFF, 1) > 1e-2


@pytest.mark.slow
def test_control_the_gate_as_published():
    """It looks at the whole block; `make_plan` refuses it where tokens are drawn."""
    assert far_off(Gate(config=CONFIG, causal=False), CLIFF, 1) > 1e-2


# Whatever is drafted is verified, but it is worth its time only after good proposals.
DEAR = CostTable(
    curve([1, 2, 3], [10.0, 10.0, 10.0]),
    np.float32(0),
    np.zeros(2, np.float32),
    np.full(2, 12.0, np.float32),
)


def skipping(monkeypatch):
    """Round 1 decides from the proposal that it verifies, which is more than it may."""
    real = decide.first_memory

    def newest(policy, offer):
        memory = real(policy, offer)
        older = dataclasses.replace(memory.older, usual=memory.newest.usual)
        return dataclasses.replace(memory, older=older)

    monkeypatch.setattr(schedule, "first_memory", newest)
    sure, unsure = (
        Offer(v, v, jnp.ones(1, bool), jnp.zeros(1, jnp.int32), v)
        for v in (jnp.asarray([[0.8, 0.7]]), jnp.asarray([[0.5, 0.1]]))
    )
    once = jnp.int32(1)
    assert decide.draft_pays(sure, DEAR, once)
    assert not decide.draft_pays(unsure, DEAR, once)


def test_going_without_a_proposal_keeps_the_law(monkeypatch):
    skipping(monkeypatch)
    assert far_off(Budget(), DEAR, 2) < 1e-9


@pytest.mark.slow
def test_control_a_proposal_that_is_verified_twice(monkeypatch):
    """As if a round that made none left the old one waiting."""
    skipping(monkeypatch)
    real = decide.with_offer

    def waits(memory, offer, drafts):
        memory = real(memory, offer, drafts)
        newest = dataclasses.replace(memory.newest, values=offer.values)
        drafted = jnp.ones_like(memory.drafted)
        return dataclasses.replace(memory, newest=newest, drafted=drafted)

    monkeypatch.setattr(decide, "with_offer", waits)
    assert far_off(Budget(), DEAR, 2) > 1e-2
