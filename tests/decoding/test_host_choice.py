"""Which offer decides about a round on the host, and what newcomers have."""

import numpy as np
import pytest

from dspark_jax.decoding.host_choice import HostChoice
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel
from dspark_jax.scheduling.memory import NewerProposal, Offer

# A staircase whose second step pays only for good drafts.
COSTS = CostModel(curve([2, 4, 6], [1.0, 1.5, 2.2]), draft_ms=0.0)
RUN = np.array([True, True])


def offer(values, generation=(10, 20), live=(True, True), usual=None):
    rows = np.asarray(values, np.float32)
    means = rows if usual is None else np.asarray(usual, np.float32)
    marks = np.asarray(generation, np.int32)
    return Offer(rows, rows, np.asarray(live), marks, means)


GOOD, BAD = [[0.95, 0.94]] * 2, [[0.1, 0.05]] * 2


def choices(*offers):
    out = HostChoice(COSTS, 2)
    for number, one in enumerate(offers):
        out.add(number, one)
    return out


def test_the_first_round_counts_what_is_missing_as_one():
    assert choices(offer(BAD)).choose(1, np.array([10, 20]), RUN)[0] == 6


def test_a_round_follows_the_offer_two_before_it():
    later = offer(GOOD, (12, 22))
    assert choices(offer(BAD), later).choose(2, np.array([12, 22]), RUN)[0] == 2
    other = choices(offer(GOOD), offer(BAD, (12, 22)))
    assert other.choose(2, np.array([12, 22]), RUN)[0] == 6


def test_a_newcomer_counts_as_one_then_by_its_own_first_offer():
    """It joins in place 1 behind round 2; rounds 3 and 4 follow."""
    one = choices(
        offer([[0.1, 0.05], [0.1, 0.05]]),
        offer([[0.1, 0.05], [0.1, 0.05]], (12, 22)),
    )
    one.join(2, [1], offer([[0.1, 0.02]], (5,), (True,)))
    # Proposal 2 was made by round 2 for the old request in place 1.
    one.add(2, offer([[0.1, 0.05], [0.9, 0.9]], (14, 99)))
    one.add(3, offer(GOOD, (16, 7)))
    # Round 3: offer 1, the newcomer's part missing.
    assert one.choose(3, np.array([14, 5]), RUN)[0] == 4
    # Round 4: offer 2, with its own first one; 99 is not its generation.
    assert one.choose(4, np.array([16, 7]), RUN)[0] == 2
    assert one.choose(5, np.array([18, 9]), RUN)[0] == 6


def test_a_newcomer_counts_where_nobody_was():
    empty = offer([[0.1, 0.05], [0.0, 0.0]], live=(True, False))
    one = choices(empty, empty, empty)
    one.join(2, [1], offer([[0.9, 0.8]], (5,), (True,)))
    assert one.choose(3, np.array([14, 5]), RUN)[0] == 4


@pytest.mark.parametrize("waiting", [(10, 25), (15, 20)])
def test_an_offer_of_what_waits_is_refused(waiting):
    with pytest.raises(NewerProposal):
        choices(offer(GOOD), offer(GOOD)).choose(2, np.asarray(waiting), RUN)


def test_an_ended_request_is_not_asked_for_its_generation():
    one = choices(offer(GOOD, (10, 30)), offer(GOOD))
    assert one.choose(2, np.array([12, 20]), np.array([True, False]))[0] == 6


def test_a_round_that_follows_none_has_one_row_a_request():
    """Drafts cost more than they usually bring, whatever the last ones promised."""
    dear = CostModel(curve([2, 4, 6], [1.0, 1.1, 1.2]), draft_ms=1.5)
    one = HostChoice(dear, 2)
    for number in range(4):
        marks = (10 + 2 * number, 20 + 2 * number)
        one.add(number, offer(GOOD, marks, usual=BAD))
    # Nothing is known before round 1, and 6 tokens for 2.7 ms are worth it.
    assert one.choose(1, np.array([10, 20]), RUN) == (6, True)
    assert one.choose(2, np.array([12, 22]), RUN) == (6, False)
    assert one.choose(3, np.array([14, 24]), RUN) == (2, False)
    # A newcomer has a proposal, and is taken at its word.
    one.join(3, [1], offer([[0.9, 0.8]], (5,), (True,)))
    total, drafts = one.choose(4, np.array([16, 6]), RUN)
    assert total > 2 and not drafts
    # Control: where proposals cost nothing there are always some.
    free = choices(*(offer(GOOD, usual=BAD) for _ in range(3)))
    assert free.choose(2, np.array([12, 22]), RUN) == (6, True)


def test_a_probe_finds_out_whether_drafts_are_worth_it_again():
    dear = CostModel(curve([2, 4, 6], [1.0, 1.1, 1.2]), draft_ms=0.8)
    one, found = HostChoice(dear, 2), []
    for number in range(1, 205):
        one.add(number - 1, offer(BAD, (0, 0)))
        found.append(one.choose(number, np.array([10, 20]), RUN)[1])
    # 0.8 + 0.2 ms on top of 1.0, at most 1 % of the time: once in 100 rounds.
    assert [number for number, drafts in enumerate(found, 1) if drafts] == [1, 99, 199]


def test_later_times_decide_later_rounds():
    """Most rounds took far longer than they were measured at."""
    costs = CostModel(curve([2, 4, 6], [1.4, 1.6, 2.9]), draft_ms=0.5)
    one, fair = HostChoice(costs, 2), [[0.9, 0.75]] * 2
    one.add(0, offer(fair))
    assert one.choose(2, np.array([12, 22]), RUN) == (4, True)
    for _ in range(10):
        costs.observe_round(requests=2, rows=4, drafts=True, round_ms=2.1)
    one.add(1, offer(fair, (12, 22)))
    assert one.choose(3, np.array([14, 24]), RUN) == (4, True)
    for _ in range(11):
        costs.observe_round(requests=2, rows=4, drafts=True, round_ms=8.1)
    # Six milliseconds that rows do not change: 5.3 tokens in 9.4 ms are more than 3.8
    # in 8.1.
    assert costs.sampler.value(2) == pytest.approx(6.0)
    assert costs.slope.value() == pytest.approx(0.0, abs=1e-6)
    one.add(2, offer(fair, (14, 24)))
    assert one.choose(4, np.array([16, 26]), RUN) == (6, True)
