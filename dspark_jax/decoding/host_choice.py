"""What the host decides about a round while the round before it runs.

    offer k      of the proposal that round k made, 0 the prefill
    round r      verifies proposal r - 1, which may still be in the making; offer r - 2
                 says how wide it is, and whether it makes proposal r

A request that joined behind round k brings a proposal that takes the place of its
place's number k; nothing came before it, and what is missing counts as 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dspark_jax.decoding.schedule import choose_on_host
from dspark_jax.scheduling.cost_model import Costs, table_of
from dspark_jax.scheduling.memory import Offer, require_older


@dataclasses.dataclass(frozen=True)
class _Joined:
    """A request's first offer, and the number whose place it takes."""

    number: int
    offer: Offer
    at: int


class HostChoice:
    """Offers that came back, and what follows from them."""

    def __init__(self, costs: Costs, size: int):
        """Knows no offer; costs of up to `size` requests are read round by round."""
        self._costs, self._size = costs, size
        self._offers: dict[int, Offer] = {}
        self._joined: dict[int, _Joined] = {}
        # Whether the round before the next one drafts.
        self._waits = True

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
            self._joined[row] = _Joined(number, offer, at)
        self._waits = True

    def choose(
        self, launched: int, waiting: np.ndarray, running: np.ndarray
    ) -> tuple[int, bool]:
        """Rows of round `launched`, and whether it makes a proposal.

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
            ones = np.ones_like(offer.values)
            offer = dataclasses.replace(offer, values=ones, usual=ones)
        costs = table_of(self._costs, self._size)
        total, drafts = choose_on_host(offer, costs, launched)
        if not self._waits:
            # Nothing to verify: one row a request.
            total = int(np.sum(offer.live))
        self._waits = drafts
        return total, drafts

    def _as_of(self, number: int) -> Offer:
        """Offer `number`, with requests that joined later in their places."""
        offer = self._offers[number]
        late = {row: one for row, one in self._joined.items() if one.number >= number}
        if not late:
            return offer
        assert offer.usual is not None
        values, usual = np.array(offer.values), np.array(offer.usual)
        live, generation = np.array(offer.live), np.array(offer.generation)
        for row, one in late.items():
            live[row] = True
            if one.number > number:
                values[row], usual[row], generation[row] = 1.0, 1.0, 0
                continue
            first = one.offer
            assert first.usual is not None
            values[row], usual[row] = first.values[one.at], first.usual[one.at]
            generation[row] = first.generation[one.at]
        return dataclasses.replace(
            offer, values=values, usual=usual, live=live, generation=generation
        )
