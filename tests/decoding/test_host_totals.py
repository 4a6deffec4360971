"""Which offer decides a round's total on the host, and what newcomers have."""

import numpy as np
import pytest

from dspark_jax.decoding.host_totals import HostTotals
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel, table_of
from dspark_jax.scheduling.memory import NewerProposal, Offer

# A staircase whose second step pays only for good drafts.
COSTS = table_of(CostModel(curve([2, 4, 6], [1.0, 1.5, 2.2]), draft_ms=0.0), 2)
RUN = np.array([True, True])


def offer(values, generation=(10, 20), live=(True, True)):
    rows = np.asarray(values, np.float32)
    return Offer(rows, rows, np.asarray(live), np.asarray(generation, np.int32))


GOOD, BAD = [[0.95, 0.94]] * 2, [[0.1, 0.05]] * 2


def totals(*offers):
    out = HostTotals(COSTS)
    for number, one in enumerate(offers):
        out.add(number, one)
    return out


def test_the_first_round_counts_what_is_missing_as_one():
    assert totals(offer(BAD)).choose(1, np.array([10, 20]), RUN) == 6


def test_a_round_follows_the_offer_two_before_it():
    later = offer(GOOD, (12, 22))
    assert totals(offer(BAD), later).choose(2, np.array([12, 22]), RUN) == 2
    other = totals(offer(GOOD), offer(BAD, (12, 22)))
    assert other.choose(2, np.array([12, 22]), RUN) == 6


def test_a_newcomer_counts_as_one_then_by_its_own_first_offer():
    """It joins in place 1 behind round 2; rounds 3 and 4 follow."""
    one = totals(
        offer([[0.1, 0.05], [0.1, 0.05]]),
        offer([[0.1, 0.05], [0.1, 0.05]], (12, 22)),
    )
    one.join(2, [1], offer([[0.1, 0.02]], (5,), (True,)))
    # Proposal 2 was made by round 2 for the old request in place 1.
    one.add(2, offer([[0.1, 0.05], [0.9, 0.9]], (14, 99)))
    one.add(3, offer(GOOD, (16, 7)))
    # Round 3: offer 1, the newcomer's part missing.
    assert one.choose(3, np.array([14, 5]), RUN) == 4
    # Round 4: offer 2, with its own first one; 99 is not its generation.
    assert one.choose(4, np.array([16, 7]), RUN) == 2
    assert one.choose(5, np.array([18, 9]), RUN) == 6


def test_a_newcomer_counts_where_nobody_was():
    empty = offer([[0.1, 0.05], [0.0, 0.0]], live=(True, False))
    one = totals(empty, empty, empty)
    one.join(2, [1], offer([[0.9, 0.8]], (5,), (True,)))
    assert one.choose(3, np.array([14, 5]), RUN) == 4


@pytest.mark.parametrize("waiting", [(10, 25), (15, 20)])
def test_an_offer_of_what_waits_is_refused(waiting):
    with pytest.raises(NewerProposal):
        totals(offer(GOOD), offer(GOOD)).choose(2, np.asarray(waiting), RUN)


def test_an_ended_request_is_not_asked_for_its_generation():
    one = totals(offer(GOOD, (10, 30)), offer(GOOD))
    assert one.choose(2, np.array([12, 20]), np.array([True, False])) == 6
