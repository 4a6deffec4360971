"""Which proposal's numbers a decision may be handed."""

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling.memory import NewerProposal, Offer, require_older


def offer(*generation):
    batch = len(generation)
    zeros = jnp.zeros((batch, 2), jnp.float32)
    return Offer(zeros, zeros, jnp.ones(batch, bool), jnp.asarray(generation))


EVERY = np.ones(2, bool)


def test_older_proposals_pass():
    one = offer(5, 9)
    assert require_older(one, np.asarray([6, 12]), EVERY) is one


@pytest.mark.parametrize("waiting", [(5, 12), (4, 12), (6, 9)])
def test_the_waiting_proposal_and_later_ones_are_refused(waiting):
    with pytest.raises(NewerProposal, match="only older ones"):
        require_older(offer(5, 9), np.asarray(waiting), EVERY)


def test_every_request_has_a_count_of_its_own():
    """One that paused keeps its proposal while others go on."""
    paused = offer(5, 90)
    with pytest.raises(NewerProposal, match=r"\[0\]"):
        require_older(paused, np.asarray([5, 93]), EVERY)
    # An ended request is not looked at.
    require_older(paused, np.asarray([5, 93]), np.asarray([False, True]))
