"""The total of a round, chosen on the host while the round before it runs.

    offer k      of the proposal that round k made, 0 the prefill
    round r      verifies proposal r - 1, which may still be in the making, and is as
                 wide as offer r - 2 says

A request that joined behind round k brings a proposal that takes the place of its
place's number k; nothing came before it, and what is missing counts as 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dspark_jax.decoding.schedule import total_on_host
from dspark_jax.scheduling.cost_model import CostTable
from dspark_jax.scheduling.memory import Offer, require_older


@dataclasses.dataclass(frozen=True)
class _Joined:
    """A request's first offer, and the number whose place it takes."""

    number: int
    values: np.ndarray
    generation: int


class HostTotals:
    """Offers that came back, and what follows from them."""

    def __init__(self, costs: CostTable):
        """Knows no offer."""
        self._costs = costs
        self._offers: dict[int, Offer] = {}
        self._joined: dict[int, _Joined] = {}

    def add(self, number: int, offer: Offer) -> None:
        """Takes offer `number`, of numpy arrays."""
        self._offers[number] = offer

    def join(self, number: int, rows: Sequence[int], offer: Offer) -> None:
        """New requests in these places, behind round `number`.

        Args:
          number: rounds launched so far.
          rows: places of the first requests of `offer`.
          offer: of their first proposals, numpy arrays.
        """
        for at, row in enumerate(rows):
            self._joined[row] = _Joined(
                number, np.asarray(offer.values[at]), int(offer.generation[at])
            )

    def choose(self, launched: int, waiting: np.ndarray, running: np.ndarray) -> int:
        """Rows of round `launched`.

        Args:
          launched: r, counting from 1.
          waiting: int[B]. Generation of the proposal that waits, or less.
          running: bool[B]. Places whose request runs.

        Raises:
          NewerProposal: an offer that the round must not know.
        """
        number = max(launched - 2, 0)
        self._offers.pop(number - 1, None)
        offer = self._as_of(number)
        if launched > 1:
            require_older(offer, waiting, np.asarray(offer.live) & running)
        else:
            offer = dataclasses.replace(offer, values=np.ones_like(offer.values))
        return total_on_host(offer, self._costs)

    def _as_of(self, number: int) -> Offer:
        """Offer `number`, with requests that joined later in their places."""
        offer = self._offers[number]
        late = {row: one for row, one in self._joined.items() if one.number >= number}
        if not late:
            return offer
        values, live = np.array(offer.values), np.array(offer.live)
        generation = np.array(offer.generation)
        for row, one in late.items():
            is_first = one.number == number
            values[row] = one.values if is_first else 1.0
            generation[row] = one.generation if is_first else 0
            live[row] = True
        return dataclasses.replace(
            offer, values=values, live=live, generation=generation
        )
