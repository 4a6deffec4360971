"""A batch on its way: prompts in, rounds out, from Python.

The device keeps the state; the host learns what each round emitted. A second round
is launched before the first one's results are read, so that the device does not
wait for the host. A request that has ended may give its place to another one:

    place 0   a a a a a a a      rounds run on while
    place 1   b b b c c c c      c takes the place of b

What the host does is marked for `jax.profiler`: `dspark.choose` (rows of a round),
`dspark.launch`, `dspark.wait`; the rest of its time goes into text.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.profiler import TraceAnnotation

from dspark_jax.decoding.extras import Extras
from dspark_jax.decoding.feeding import prefill
from dspark_jax.decoding.host_choice import HostChoice
from dspark_jax.decoding.host_round import HostRound, read_round
from dspark_jax.decoding.plans import make_plan
from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.publishing import RoundOut
from dspark_jax.decoding.requests import Requests, Variant, holds_rows, replaced
from dspark_jax.decoding.schedule import Plan
from dspark_jax.decoding.shapes import Shapes
from dspark_jax.decoding.state import RUNNING, STOP, DecodeState
from dspark_jax.models.params import Tree
from dspark_jax.scheduling.cost_model import CostModel, Costs, table_of
from dspark_jax.scheduling.policy import Budget, Scheduled
from dspark_jax.scheduling.round_clock import RoundClock
from dspark_jax.spec import Spec

# Rounds in flight at most.
AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the rounds of a turn do.

    Attributes:
      variant: what their programs can do.
      extras: what is wanted beside tokens.
      policy: how many drafts a request verifies; None is all.
      costs: measured times, for policies that weigh them.
      shapes: sizes to keep to; None where bits may differ between sizes.
    """

    variant: Variant
    extras: Extras
    policy: Scheduled | None = None
    costs: Costs | None = None
    shapes: Shapes | None = None


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A round on its way: results, whose they are, and what the host chose for it.

    `choice` is its rows and whether it drafts, numbers of the host:
    asking the plan's arrays could wait for the round behind.
    """

    out: RoundOut
    served: list[int]
    choice: tuple[int, bool] | None


class Batch:
    """B requests that are decoded together.

    Attributes:
      state: the device state, None once it was handed on.
      tokens: committed ids of the request in each place, prompt included.
      turn: changes when requests go on or join; states of an earlier one are stale.
    """

    def __init__(
        self,
        spec: Spec,
        params: Tree,
        programs: Programs,
        requests: Requests,
        count: int,
        capacity: int,
        draft_length: int,
        settings: Settings,
    ):
        """Reserves the caches for `count` requests of the batch bucket."""
        self._spec, self._params, self._programs = spec, params, programs
        self.count = count
        self.draft_length = draft_length
        self.size = requests.scale.shape[0]
        self._choice: HostChoice | None = None
        self.resettle(requests, settings)
        self.state: DecodeState | None = programs.init(
            self.size, capacity, draft_length
        )
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.turn = 0
        self._finish = [RUNNING] * count
        self._budget = [0] * count
        # Requests that a place has had.
        self._served = [0] * count
        self._flights: deque[_Flight] = deque()
        self._clock = RoundClock()
        self._launched = 0

    def resettle(self, requests: Requests, settings: Settings) -> None:
        """New settings for the next turn of the same requests."""
        self._requests, self._settings = requests, settings
        self._plan = None
        if settings.policy is None:
            return
        costs = settings.costs
        table = None if costs is None else table_of(costs, self.size)
        self._plan = make_plan(
            self._spec,
            settings.policy,
            self.size,
            self.draft_length,
            table,
            settings.variant,
            settings.shapes and settings.shapes.rows,
        )

    @property
    def capacity(self) -> int:
        """Positions that a request has."""
        return self._owned().capacity

    def reserve(self, capacity: int) -> None:
        """Makes room for `capacity` positions a request, if there is less."""
        state = self._owned()
        if capacity > state.capacity:
            # A waiting proposal is made anew after the next prefill.
            state = dataclasses.replace(state, proposal=None, memory=None)
            self.state = self._programs.grow(state, capacity)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        budgets: Sequence[int],
        masks: np.ndarray | None = None,
    ) -> HostRound:
        """Feeds new tokens of every request and draws the first token after them.

        Args:
          prompts: ids to add to each request; the last committed token of an
            earlier turn is fed again by itself, as it was never cached.
          budgets: tokens each request may emit.
          masks: for the first tokens, see `prefill.begin`.
        """
        self.turn += 1
        self._flights.clear()
        self._launched = 0
        self._finish = [RUNNING] * self.count
        self._budget = list(budgets)
        self._clock.restart()
        self._choice, costs = None, self._settings.costs
        if isinstance(self._settings.policy, Budget) and costs is not None:
            self._choice = HostChoice(costs, self.size)
        starts = [max(len(known) - 1, 0) for known in self.tokens]
        pending: list[list[int]] = []
        for known, new in zip(self.tokens, prompts, strict=True):
            pending.append([*known[-1:], *new])
            known.extend(new)
        self.state, out = self._prefill(
            self._owned(), self._requests, pending, starts, budgets, masks
        )
        out = self._programs.fetch(out)
        if self._choice is not None and out.offer is not None:
            self._choice.add(0, out.offer)
        return self._take(out, list(range(self.count)))

    def join(
        self,
        places: Sequence[int],
        prompts: Sequence[Sequence[int]],
        budgets: Sequence[int],
        requests: Requests,
        masks: np.ndarray | None = None,
    ) -> HostRound:
        """Lets new requests take the places of ended ones, between two rounds.

        They are fed by themselves, so that what comes out does not depend on the
        others. Rounds in flight go on; what they emit in these places is dropped.

        Args:
          places: of requests that have ended.
          prompts: ids, one list a new request.
          budgets: tokens each may emit.
          requests: settings, padded to a batch bucket.
          masks: as in `start`, padded likewise.

        Returns:
          The first token of each; other places emit nothing.
        """
        self.turn += 1
        whole = self._owned()
        size = requests.scale.shape[0]
        part = self._programs.init(size, whole.capacity, self.draft_length)
        starts = [0] * len(prompts)
        part, out = self._prefill(part, requests, prompts, starts, budgets, masks)
        for row, place in enumerate(places):
            whole = self._programs.insert(whole, part, row, place)
            self.tokens[place] = list(prompts[row])
            self._finish[place] = RUNNING
            self._budget[place] = budgets[row]
            self._served[place] += 1
        self.state = whole
        self._requests = replaced(self._requests, places, requests)
        out = self._programs.fetch(out)
        if self._choice is not None and out.offer is not None:
            self._choice.join(self._launched, places, out.offer)
        return self._take(out, list(places))

    def launch(self, masks: np.ndarray | None = None) -> None:
        """Puts a round in flight; see `round.decode_round` for `masks`."""
        self._launched += 1
        with TraceAnnotation("dspark.choose"):
            plan, choice = self._next_plan()
        with TraceAnnotation("dspark.launch"):
            self.state, out = self._programs.round(
                self._params,
                self._owned(),
                self._requests,
                self._settings.variant,
                self._settings.extras,
                plan,
                masks,
                self._settings.shapes and self._settings.shapes.rows[-1],
            )
        self._clock.launched()
        self._flights.append(_Flight(out, list(self._served), choice))

    def launch_ahead(self) -> None:
        """Puts rounds in flight that some request will use, stop tokens aside.

        A request is sure to run on when it has more tokens left than the rounds
        in flight can emit. A stop token may end it all the same; the round after
        it then emits nothing.
        """
        while len(self._flights) < AHEAD:
            at_most = len(self._flights) * (self.draft_length + 1)
            if not any(self._left(row) > at_most for row in range(self.count)):
                return
            self.launch()

    def receive(self) -> HostRound:
        """What the oldest round in flight emitted; waits for it."""
        flight = self._flights.popleft()
        was_there = flight.out.emitted.is_ready()  # type: ignore[attr-defined]
        with TraceAnnotation("dspark.wait"):
            out = self._programs.fetch(flight.out)
        self._observe(flight, self._clock.received(was_there))
        if self._choice is not None and out.offer is not None:
            self._choice.add(self._launched - len(self._flights), out.offer)
        rows = [
            row if flight.served[row] == now and self._finish[row] == RUNNING else None
            for row, now in enumerate(self._served)
        ]
        return self._take(out, rows)

    def step(self) -> HostRound:
        """One round by itself."""
        self.launch()
        return self.receive()

    def end(self, row: int, length: int) -> None:
        """Ends a request, keeping its first `length` committed tokens.

        Caches are addressed by position, so a shorter length is all it takes.
        What rounds in flight still emit for it is dropped.
        """
        self._finish[row] = self._finish[row] or STOP
        del self.tokens[row][length:]

    def settle(self) -> None:
        """Waits for the rounds in flight and drops what they emit."""
        jax.block_until_ready([flight.out for flight in self._flights])
        self._flights.clear()
        self._clock.restart()

    def _next_plan(self) -> tuple[Plan | None, tuple[int, bool] | None]:
        """What the next round does, and what of that the host chose."""
        plan = self._plan
        if plan is None or self._choice is None:
            return plan, None
        waiting = np.zeros((self.size,), np.int64)
        running = np.zeros((self.size,), bool)
        for row, known in enumerate(self.tokens):
            mine = [one.served[row] == self._served[row] for one in self._flights]
            waiting[row] = len(known) + sum(mine)
            running[row] = self._finish[row] == RUNNING
        total, drafts = self._choice.choose(self._launched, waiting, running)
        bucket = next((g for g in plan.buckets if g >= total), plan.buckets[-1])
        # As numpy: moving them to a busy CPU device would wait for it.
        rows: Any = np.int32(total)
        drafting: Any = np.bool_(drafts)
        plan = Plan(None, rows, plan.policy, (bucket,), drafting)
        return plan, (total, drafts)

    def _observe(self, flight: _Flight, round_ms: float | None) -> None:
        """Tells the cost model what a round took, where no text depends on that.

        Drawn text does, through the lengths: it would change with the machine's load.
        """
        costs, requests = self._settings.costs, self._finish.count(RUNNING)
        if round_ms is None or not isinstance(costs, CostModel) or not costs.follows:
            return
        if flight.choice is None or holds_rows(self._settings.variant):
            return
        rows, drafts = flight.choice
        costs.observe_round(
            requests=requests, rows=rows, drafts=drafts, round_ms=round_ms
        )

    def _left(self, row: int) -> int:
        """Tokens that a request may still emit."""
        if self._finish[row] != RUNNING:
            return 0
        room = self._owned().capacity - len(self.tokens[row])
        return min(self._budget[row], room)

    def _owned(self) -> DecodeState:
        if self.state is None:
            raise ValueError("this batch has no state any more")
        return self.state

    def _prefill(
        self,
        state: DecodeState,
        requests: Requests,
        pending: Sequence[Sequence[int]],
        starts: Sequence[int],
        budgets: Sequence[int],
        masks: np.ndarray | None,
    ) -> tuple[DecodeState, RoundOut]:
        return prefill(
            self._spec,
            self._params,
            self._programs,
            state,
            requests,
            self._settings.variant,
            self._settings.policy,
            pending,
            starts,
            budgets,
            masks,
            self._settings.shapes,
        )

    def _take(self, out: RoundOut, rows: Sequence[int | None]) -> HostRound:
        """Enters a round's tokens; `rows` are places, None where nobody takes them."""
        if not self._settings.extras.logprobs:
            out = dataclasses.replace(out, logprobs=None)
        one = read_round(out, rows, self.count)
        broken = [i for i, row in enumerate(one.emitted) if row and min(row) < 0]
        if broken:
            raise ValueError(
                f"places {broken} got logits without a finite maximum (NaN, inf, or "
                "every token excluded); check the weights, the filters and the masks"
            )
        position = [len(known) for known in self.tokens]
        for row, new in enumerate(one.emitted):
            self.tokens[row].extend(new)
            self._budget[row] -= len(new)
        for row in rows:
            if row is not None:
                self._finish[row] = one.finish[row]
        return dataclasses.replace(one, position=position, finish=list(self._finish))
