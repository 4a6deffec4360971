"""What a round's lengths are decided from: which offer, which costs, which counts."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling import decide
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostTable
from dspark_jax.scheduling.gate import GateConfig, GateState
from dspark_jax.scheduling.memory import Memory, Offer
from dspark_jax.scheduling.policy import Budget, EarlyStop, Gate, Threshold
from tests.models.quick import quick_jit

# The page of numbers by hand, specification of scheduling, section 2.
OLDER = [[0.9, 0.72, 0.36], [0.8, 0.4, 0.1]]
NEWER = [[0.6, 0.18, 0.036], [0.95, 0.855, 0.7695]]
LIVE = [True, True]

lengths = functools.partial(
    quick_jit(decide.lengths, static_argnames=("policy", "drawn")), drawn=False
)
total_of = quick_jit(decide.total_of)
wants_draft = quick_jit(decide.wants_draft, static_argnames="policy")
remember = quick_jit(decide.remember, static_argnames="policy")


def offer(values, live=None, logits=None, generation=1):
    values = jnp.asarray(values, jnp.float32)
    batch = len(values)
    return Offer(
        values,
        jnp.zeros_like(values) if logits is None else jnp.asarray(logits, jnp.float32),
        jnp.asarray([True] * batch if live is None else live),
        jnp.full((batch,), generation, jnp.int32),
    )


def memory(newest, older=None, drafted=LIVE, gate=None, rounds=5):
    older = newest if older is None else older
    return Memory(newest, older, jnp.asarray(drafted), gate, jnp.int32(rounds))


def costs(by_rows, sampler=(2.0, 2.0, 2.0), draft=(0.0, 0.0, 0.0)):
    table = curve(list(by_rows), list(by_rows.values()))
    return CostTable(
        table,
        np.float32(0),
        np.asarray(sampler, np.float32),
        np.asarray(draft, np.float32),
    )


STAIRS = costs({2: 8.0, 4: 10.0, 6: 12.0, 8: 28.0})
BOTH = memory(offer(NEWER, generation=2), offer(OLDER))


def test_a_total_of_the_older_offer_is_divided_by_the_newest():
    assert lengths(Budget(), STAIRS, BOTH, jnp.asarray(LIVE)).tolist() == [2, 4]
    given = lengths(Budget(), None, BOTH, jnp.asarray(LIVE), total=jnp.int32(6))
    assert given.tolist() == [2, 4]
    # Control: each offer in the other's place gives other lengths.
    swapped = memory(BOTH.older, BOTH.newest)
    assert lengths(Budget(), STAIRS, swapped, jnp.asarray(LIVE)).tolist() == [3, 3]
    steep = costs({2: 8.0, 4: 10.0, 6: 22.0, 8: 38.0})
    assert lengths(Budget(), steep, BOTH, jnp.asarray(LIVE)).tolist() == [1, 3]


def test_the_total_is_of_the_older_offer_alone():
    none, full = offer(np.zeros((2, 3))), offer(np.ones((2, 3)))

    def found(newest, older):
        here = memory(newest, older)
        return lengths(Budget(), STAIRS, here, jnp.asarray(LIVE)).tolist()

    assert found(full, none) == [1, 1]
    assert found(BOTH.newest, full) == [2, 4]
    # What was bought and is not there is not verified.
    assert found(none, full) == [1, 1]


@pytest.mark.parametrize(
    ("policy", "table", "wanted"),
    [
        (Budget(), STAIRS, [2, 0]),
        (EarlyStop(), STAIRS, [2, 0]),
        (Threshold(survival=0.15), None, [3, 0]),
        (Gate(), STAIRS, [4, 0]),
    ],
)
def test_an_ended_request_has_no_rows_and_a_block_that_was_not_drafted_one(
    policy, table, wanted
):
    """Four drafts are never verified where a value of 0 says there are fewer."""
    gate = decide.first_memory(policy, BOTH.newest).gate
    live = jnp.asarray([True, False])
    newest = dataclasses.replace(BOTH.newest, live=live)
    here = dataclasses.replace(BOTH, newest=newest, gate=gate)
    one = lengths(policy, table, here, live, total=jnp.int32(2))
    assert one.tolist() == wanted
    nothing = dataclasses.replace(here, drafted=jnp.asarray([False, False]))
    assert lengths(policy, table, nothing, live).tolist() == [1, 0]
    short = offer([[0.6, 0.0, 0.0], [0.9, 0.9, 0.9]])
    some = dataclasses.replace(here, newest=short)
    found = lengths(policy, table, some, live, total=jnp.int32(4)).tolist()
    assert found == [2, 0]


def test_early_stop_ends_at_a_cliff_that_a_budget_looks_over():
    cliff = costs({2: 10.0, 3: 25.0, 6: 25.0}, sampler=(0.0,) * 3)
    sure = memory(offer([[0.9, 0.9, 0.9, 0.9]]), drafted=[True])
    one = jnp.asarray([True])
    assert lengths(EarlyStop(), cliff, sure, one).tolist() == [2]
    high = costs({1: 10.0, 2: 25.0, 5: 25.0}, sampler=(0.0,) * 3)
    assert lengths(EarlyStop(), high, sure, one).tolist() == [1]
    assert lengths(Budget(), high, sure, one).tolist() == [5]


def test_drawn_tokens_make_the_gate_causal():
    """The first draft is in for what the second might be, and the second is not."""
    config = GateConfig(edges=(0.0,), margin=1.0, skip_pays_draft=False)
    learned = GateState(jnp.asarray([[0.0, 80.0]]), jnp.asarray([[99.0, 80.0]]))
    cliff = costs({1: 10.0, 2: 20.0, 3: 21.0}, sampler=(0.0,) * 3)
    logits = [[1.0, -1.0]]
    here = memory(offer([[0.7, 0.3]], logits=logits), drafted=[True], gate=learned)
    ask = functools.partial(lengths, costs=cliff, memory=here, live=jnp.asarray([True]))
    whole, causal = Gate(config=config, causal=False), Gate(config=config, causal=True)
    seen, unseen = ask(whole).tolist(), ask(causal).tolist()
    assert (seen, unseen) == ([1], [2])
    assert ask(Gate(config=config)).tolist() == seen
    assert ask(Gate(config=config), drawn=True).tolist() == unseen


def test_before_the_first_round_older_survivals_count_as_one():
    newest = offer(NEWER, logits=NEWER, generation=7)
    for policy in (Budget(), EarlyStop(), Threshold(), Gate()):
        first = decide.first_memory(policy, newest)
        for name in ("values", "logits", "live", "generation"):
            assert (getattr(first.newest, name) == getattr(newest, name)).all()
        assert first.older.values.tolist() == np.ones((2, 3)).tolist()
        assert first.older.generation.tolist() == [7, 7]
        assert first.drafted.tolist() == LIVE and int(first.rounds) == 0
        assert (first.gate is not None) == isinstance(policy, Gate)
    assert first.gate.totals.tolist() == [[0.0] * 6] * 2


def test_a_total_weighs_the_constant_times_of_so_many_requests():
    """One draft of 0.8 for 9 ms more: worth it where a round costs 10 ms anyway."""
    table = costs({1: 10.0, 2: 19.0, 3: 28.0}, (0.0,) * 3, draft=(0.0, 0.0, 20.0))
    one, two = ([[0.8], [0.0]], [True, False]), ([[0.8], [0.0]], [True, True])
    assert int(total_of(offer(*one), table)) == 1
    assert int(total_of(offer(*two), table)) == 3
    # Control: the same with the constant of one request.
    free = dataclasses.replace(table, draft_ms=np.zeros(3, np.float32))
    assert int(total_of(offer(*two), free)) == 2


# One live request: three drafts cost 3 + 13.95 to make and verify, a plain step 10.
PAYS = costs({2: 10.0, 3: 12.0, 4: 13.95}, (0.0, 0.0, 0.0), (0.0, 3.0, 3.0))
# Of the second request's drafts one in a hundred stood.
KNOWN = GateState(
    jnp.asarray([[9.0] * 6, [0.0] * 6]), jnp.asarray([[9.0] * 6, [16.5] * 6])
)


@pytest.mark.parametrize(
    ("rounds", "probes"), [(0, False), (68, False), (69, True), (70, False)]
)
def test_drafting_that_does_not_pay_is_probed_once_in_seventy_rounds(rounds, probes):
    """(3 + 13.95 - 10) / (1 % of 10) = 69.5."""
    live = [True, False]
    lost = GateState(KNOWN.hits[::-1], KNOWN.totals[::-1])
    here = memory(offer(NEWER, live), gate=lost, rounds=rounds)
    assert wants_draft(Gate(), PAYS, here, None).tolist() == [probes, True]
    for policy in (EarlyStop(), Threshold()):
        assert wants_draft(policy, PAYS, here, None).tolist() == [True, True]


def test_a_target_in_doubt_is_not_drafted_for_even_by_a_probe():
    policy, doubt = Gate(least_margin=4.0), jnp.asarray([4.0, 3.9])
    here = memory(offer(NEWER, [True, False]), gate=KNOWN, rounds=69)
    assert wants_draft(policy, PAYS, here, doubt).tolist() == [True, False]
    assert wants_draft(policy, PAYS, here, None).tolist() == [True, True]
    assert wants_draft(Gate(), PAYS, here, doubt).tolist() == [True, True]


def test_counts_are_of_requests_that_verified_drafts():
    """A paused request and one without drafts keep their counts."""
    policy = Gate(config=GateConfig(edges=(0.0,), decay=0.5))
    values, logits = np.ones((4, 3)), [[1.0, 1.0, -1.0]] * 4
    before = GateState(jnp.full((4, 2), 2.0), jnp.full((4, 2), 4.0))
    here = memory(
        offer(values, logits=logits),
        offer(values, logits=np.negative(logits)),
        drafted=[True, True, True, False],
        gate=before,
    )
    rows, kept = jnp.asarray([4, 1, 0, 1]), jnp.asarray([2, 0, 0, 0])
    after = remember(policy, here, rows, kept)
    assert int(after.rounds) == 6
    # Two stood above 0, one fell below it; then a round that verified nothing decays.
    assert after.gate.hits.tolist() == [[1.0, 3.0], [1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    totals = [[3.0, 4.0], [2.0, 2.0], [4.0, 4.0], [4.0, 4.0]]
    assert after.gate.totals.tolist() == totals
    assert after.newest.values.tolist() == values.tolist()
    quiet = remember(Budget(), dataclasses.replace(here, gate=None), rows, kept)
    assert quiet.gate is None and int(quiet.rounds) == 6
