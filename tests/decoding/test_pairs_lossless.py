"""Two requests that share a round's rows: each has its own law, and they are
independent.

Whether a draft of one is verified depends on the drafts of the other. Every random word
of both is enumerated through the serving code; the joint law must be the product.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.schedule import Plan
from dspark_jax.scheduling import decide
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostTable
from dspark_jax.scheduling.policy import Budget, Threshold
from tests.decoding.enumeration import chain
from tests.decoding.pairs import completed_pairs, enumerate_pairs

HALVES = (
    np.asarray([[1, 0, 1], [1, 1, 0], [0, 1, 1]]) / 2,
    np.asarray([[1, 1, 0], [0, 1, 1], [0, 1, 1]]) / 2,
)
# The draft is sure of itself after token 1 and doubts after token 0.
CONFIDENCE = np.asarray([-2.0, 2.0, 0.2], np.float32)
N = 2
# Where both drafts of one or the first of each may pay, a single draft never does, and
# two sure requests get four rows: they have to share two drafts.
COSTS = CostTable(
    curve([2, 3, 4, 5, 6], [10.0, 15.0, 17.0, 23.0, 26.0]),
    np.float32(0),
    np.zeros(3, np.float32),
    np.zeros(3, np.float32),
)


def far_off(policy, rounds):
    """Total variation of the joint law from the product, and the law."""
    with np.errstate(divide="ignore"):
        logs = [np.log(table) for table in HALVES]
    model = dspark.testing.scripted_model(*logs, gamma=N, confidence=CONFIDENCE)
    plan = Plan(COSTS if policy.needs_costs else None, None, policy, (2, 4, 6))
    # Prompts that end in different tokens: different laws, which cannot be mixed up.
    prompts = (1, 2)
    law = enumerate_pairs(model, N, rounds, 2, plan, prompts)
    assert abs(sum(law.values()) - 1) < 1e-12
    length = 1 + rounds * (N + 1)
    found = completed_pairs(law, HALVES[0], length)
    one, other = (chain(HALVES[0], length, after).reshape(-1) for after in prompts)
    return np.abs(found - np.outer(one, other)).sum() / 2, law


@pytest.mark.parametrize(
    ("policy", "rounds"),
    [
        (Budget(), 1),
        pytest.param(Threshold(survival=0.3), 1, marks=pytest.mark.slow),
        # The total of the second round comes from drafts of both.
        pytest.param(Budget(), 2, marks=pytest.mark.slow),
    ],
)
def test_the_joint_law_is_the_product(policy, rounds):
    distance, law = far_off(policy, rounds)
    assert distance < 1e-9
    assert len({(len(a), len(b)) for a, b in law}) > 3


@pytest.mark.slow
def test_control_rows_shared_by_what_comes_later(monkeypatch):
    """A draft ranked by its whole block's survival knows the token it is about."""
    real = decide.share

    def later(values, live, total):
        return real(jnp.broadcast_to(values[:, -1:], values.shape), live, total)

    monkeypatch.setattr(decide, "share", later)
    assert far_off(Budget(), 1)[0] > 1e-2


@pytest.mark.slow
def test_control_a_total_from_the_drafts_it_is_for(monkeypatch):
    real = decide._total

    def retrospective(costs, memory):
        return real(costs, dataclasses.replace(memory, older=memory.newest))

    monkeypatch.setattr(decide, "_total", retrospective)
    assert far_off(Budget(), 1)[0] > 1e-2
