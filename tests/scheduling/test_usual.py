"""What proposals usually promise, and whether a round is worth one."""

import jax.numpy as jnp
import numpy as np

from dspark_jax.scheduling import decide
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel
from dspark_jax.scheduling.memory import Offer
from dspark_jax.scheduling.policy import Budget, EarlyStop
from dspark_jax.scheduling.usual import add_proposal, nothing_usual, usual_values
from tests.models.quick import quick_jit

draft_pays = quick_jit(decide.draft_pays)
with_offer = quick_jit(decide.with_offer)


def offer(values, live=(True, True), usual=None):
    rows = jnp.asarray(values, jnp.float32)
    marks = jnp.zeros(len(rows), jnp.int32)
    means = rows if usual is None else jnp.asarray(usual, jnp.float32)
    return Offer(rows, rows, jnp.asarray(live), marks, means)


def test_a_mean_that_forgets():
    rng = np.random.default_rng(3)
    series = rng.random((9, 2, 3)).astype(np.float32)
    there = rng.random((9, 2)) < 0.7
    usual = nothing_usual(2, 3)
    assert usual_values(usual).tolist() == np.ones((2, 3)).tolist()
    for values, counts in zip(series, there, strict=True):
        usual = add_proposal(usual, jnp.asarray(values), jnp.asarray(counts))
    for row in range(2):
        own = series[there[:, row], row].astype(np.float64)
        weights = 0.875 ** np.arange(len(own))[::-1]
        want = (weights[:, None] * own).sum(axis=0) / weights.sum()
        np.testing.assert_allclose(usual_values(usual)[row], want, rtol=1e-6)


def test_a_proposal_pays_while_its_tokens_outrun_its_time():
    costs = CostModel(curve([2, 4, 6], [10.0, 11.0, 12.0]), draft_ms=2.95).table(2)

    def pays(values, rounds=3, **fields):
        return bool(draft_pays(offer(values, **fields), costs, jnp.int32(rounds)))

    # 2 tokens in 10 ms without; with drafts they must be more than 3 in 15.
    assert pays([[0.6, 0.0], [0.7, 0.0]], usual=[[0.6, 0.1], [0.7, 0.1]])
    assert not pays([[0.3, 0.1], [0.3, 0.1]])
    # What is usual counts, and not the last promise.
    assert not pays([[0.9, 0.9]] * 2, usual=[[0.3, 0.1]] * 2)
    assert pays([[0.1, 0.1]] * 2, usual=[[0.9, 0.9]] * 2)
    # An ended request takes no row and gives no token.
    assert not pays([[0.2, 0.1], [0.9, 0.9]], live=(True, False))
    # 2.95 + 2 ms on top of 10, at most 1 % of the time: once in 50 rounds.
    probes = [k for k in range(120) if pays([[0.3, 0.1]] * 2, rounds=k)]
    assert probes == [49, 99]


def test_a_round_without_a_proposal_leaves_what_is_usual():
    first = offer([[0.8, 0.4], [0.6, 0.3]], usual=None)
    memory = decide.first_memory(Budget(), first)
    assert memory.older.usual.tolist() == [[1.0, 1.0]] * 2
    np.testing.assert_array_equal(memory.newest.usual, first.values)
    stale = offer([[0.1, 0.1], [0.1, 0.0]])
    later = with_offer(memory, stale, jnp.bool_(False))
    assert later.drafted.tolist() == [False, False]
    # The old proposal's numbers count for nothing but what cannot be emitted.
    expected = np.asarray([[0.8, 0.4], [0.6, 0.0]], np.float32)
    np.testing.assert_array_equal(later.newest.usual, expected)
    np.testing.assert_array_equal(later.newest.values, expected)
    np.testing.assert_array_equal(later.older.values, first.values)
    made = with_offer(memory, stale, jnp.bool_(True))
    np.testing.assert_array_equal(made.newest.values, stale.values)
    assert float(made.newest.usual[0, 0]) < 0.5
    # Other policies keep no such thing.
    other = decide.first_memory(EarlyStop(), first)
    assert other.usual is None
