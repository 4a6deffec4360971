"""Field reports about how many drafts are verified; others are under `tests/engine`."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.plans import make_plan, policy_length, row_buckets
from dspark_jax.scheduling import decide
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostTable
from dspark_jax.scheduling.memory import Offer
from dspark_jax.scheduling.policy import Budget, EarlyStop, Gate, Threshold
from tests.models.quick import quick_jit

# Survival of each draft, and the cost of a step by its rows: a staircase.
SURVIVAL = np.asarray([0.9, 0.8, 0.7, 0.6])
STAIRS = [1.0, 1.0, 1.6, 1.6, 1.6]
N = len(SURVIVAL)


def costs(ms):
    """Of one request, by rows from 1 on."""
    none = np.zeros(2, np.float32)
    sizes = range(1, len(ms) + 1)
    return CostTable(curve(list(sizes), ms), np.float32(0), none, none)


def chosen(policy, ms):
    """Drafts that a policy verifies when every proposal promises the same."""
    values = jnp.asarray(SURVIVAL[None], jnp.float32)
    live, made = jnp.asarray([True]), jnp.zeros(1, jnp.int32)
    offer = Offer(values, jnp.zeros_like(values), live, made)
    memory = decide.first_memory(policy, offer)
    return int(decide.lengths(policy, costs(ms), memory, live, True)[0]) - 1


def test_fr24_a_budget_looks_beyond_a_step_of_the_costs():
    """1.9, 1.69, 2.125 and 2.5 tokens a unit of time for 1, 2, 3 and 4 drafts."""
    rates = (1 + np.cumsum(SURVIVAL)) / np.asarray(STAIRS[1:])
    np.testing.assert_allclose(rates, [1.9, 1.6875, 2.125, 2.5])
    assert chosen(Budget(), STAIRS) == 4
    # Control: the rule that stops at the first fall, and a last step that is too high.
    assert chosen(EarlyStop(), STAIRS) == 1
    assert chosen(Budget(), [*STAIRS[:4], 2.2]) == 3


def cycle(confidence):
    """A model that says 0 1 2 3 4 0 1 ..; its draft knows, and is as sure as told."""
    after = (np.arange(N + 1) + 1) % (N + 1)
    logits = np.where(np.arange(N + 1) == after[:, None], 50.0, -50.0)
    return dspark.testing.scripted_model(
        logits, logits, gamma=N, confidence=np.log(confidence / (1 - confidence))
    )


@pytest.mark.slow
def test_fr24_through_the_rounds():
    # Given the token before it: 0.9 after 0, then such that survivals are as above.
    given = np.asarray([*SURVIVAL, 0.5]) / np.asarray([1.0, *SURVIVAL])
    model = cycle(given.astype(np.float32))

    @functools.partial(quick_jit, static_argnames="policy")
    def run(params, tokens, costs, policy):
        return dspark.generate_tokens(
            model.spec, params, tokens, np.asarray([1], np.int32), max_new_tokens=21,
            policy=policy, costs=costs, capacity=64,
        )  # fmt: skip

    # The prefill emits 0, and every round the four drafts and the next 0.
    prompt = np.asarray([[N]], np.int32)
    out = run(model.params, prompt, costs(STAIRS), Budget())
    assert out.tokens[0].tolist() == [i % (N + 1) for i in range(21)]
    counters = out.counters
    assert (int(counters.rounds[0]), int(counters.drafted[0])) == (4, 16)
    # A step that costs too much beyond two rows: one draft a round.
    steep = run(model.params, prompt, costs([1.0, 1.0, 9.0, 9.0, 9.0]), Budget())
    assert steep.tokens.tolist() == out.tokens.tolist()
    # A second row is free.
    rounds, drafted = int(steep.counters.rounds[0]), int(steep.counters.drafted[0])
    assert (rounds, drafted) == (10, 10)


def test_fr24_no_costs_is_an_error_and_no_policy_is_the_whole_block():
    """The report asks for whole blocks and a notice; here nothing is guessed."""
    spec = cycle(np.full(N + 1, 0.5, np.float32)).spec
    for policy in (Budget(), EarlyStop(), Gate()):
        assert policy.needs_costs
        with pytest.raises(ValueError, match=r"weighs time; give `costs`.*profile"):
            make_plan(spec, policy, 1, N, None, "greedy")
    plan = make_plan(spec, Threshold(survival=0.5), 1, N, None, "greedy")
    assert plan.costs is None and plan.buckets == row_buckets(1, N)
    assert policy_length(spec, None, None) == (N, None)
    assert policy_length(spec, dspark.Fixed(), None) == (N, None)
