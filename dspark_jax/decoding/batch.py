"""A batch on its way: prompts in, rounds out, from Python.

The device keeps the state; the host learns what each round emitted. A second round
is launched before the first one's results are read, so that the device does not
wait for the host.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.extras import Extras
from dspark_jax.decoding.plans import check_seeds, make_plan
from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.publishing import RoundOut
from dspark_jax.decoding.requests import Requests, Variant, holds_rows, is_noisy
from dspark_jax.decoding.schedule import Plan, total_on_host
from dspark_jax.decoding.state import RUNNING, STOP, DecodeState, new_counters
from dspark_jax.models.attention import block_fits, slots_for
from dspark_jax.models.params import Tree
from dspark_jax.scheduling.cost_model import Costs, table_of
from dspark_jax.scheduling.memory import Offer, require_older
from dspark_jax.scheduling.policy import Budget, Scheduled
from dspark_jax.settings import Buckets
from dspark_jax.spec import Spec

# Rounds in flight at most.
AHEAD = 2


@dataclasses.dataclass(frozen=True)
class HostRound:
    """What one round emitted, per request, as Python lists.

    Attributes:
      emitted: tokens.
      kept: accepted drafts among them.
      drafted: drafts that were verified.
      finish: index into `FINISH_REASONS`; 0 while running.
      logprobs: of the emitted tokens, or empty lists.
      position: committed tokens before the round.
      confidence: logits of the drafts that were verified; empty lists unless traced,
        and without a confidence head.
      overlap: `sum_v min(p_v, q_v)` of those drafts' rows; empty lists unless traced,
        and where no rows are held.
    """

    emitted: list[list[int]]
    kept: list[int]
    drafted: list[int]
    finish: list[int]
    logprobs: list[list[float]]
    position: list[int]
    confidence: list[list[float]]
    overlap: list[list[float]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the rounds of a turn do.

    Attributes:
      variant: what their programs can do.
      extras: what is wanted beside tokens.
      policy: how many drafts a request verifies; None is all.
      costs: measured times, for policies that weigh them.
      deterministic: see `plans.make_plan`.
    """

    variant: Variant
    extras: Extras
    policy: Scheduled | None = None
    costs: Costs | None = None
    deterministic: bool = False


class Batch:
    """B requests that are decoded together.

    Attributes:
      state: the device state, None once it was handed on.
      tokens: committed ids of each request, prompt included.
      turn: prefills so far; states of an earlier one are stale.
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
        self.resettle(requests, settings)
        self.state: DecodeState | None = programs.init(
            self.size, capacity, draft_length
        )
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.turn = 0
        self._finish = [RUNNING] * count
        self._budget = [0] * count
        self._flights: deque[RoundOut] = deque()
        # By the round that made them, on the host.
        self._offers: dict[int, Offer] = {}
        self._launched = 0

    def resettle(self, requests: Requests, settings: Settings) -> None:
        """New settings for the next turn of the same requests."""
        self._requests, self._settings = requests, settings
        self._plan = None
        if settings.policy is not None:
            check_seeds(settings.policy, settings.variant, requests.seeds[: self.count])
            self._plan = make_plan(
                self._spec,
                settings.policy,
                self.size,
                self.draft_length,
                None if settings.costs is None else table_of(settings.costs, self.size),
                settings.variant,
                settings.deterministic,
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
        self, prompts: Sequence[Sequence[int]], budgets: Sequence[int]
    ) -> HostRound:
        """Feeds new tokens of every request and draws the first token after them.

        Args:
          prompts: ids to add to each request; the last committed token of an
            earlier turn is fed again by itself, as it was never cached.
          budgets: tokens each request may emit.
        """
        self.turn += 1
        self._flights.clear()
        self._offers.clear()
        self._launched = 0
        self._finish = [RUNNING] * self.count
        self._budget = list(budgets)
        state = self._owned()
        pending: list[list[int]] = []
        starts = np.zeros((self.size,), np.int32)
        for row, (known, new) in enumerate(zip(self.tokens, prompts, strict=True)):
            starts[row] = max(len(known) - 1, 0)
            pending.append([*known[-1:], *new])
            known.extend(new)
        pending += [[] for _ in range(self.size - self.count)]
        finish = np.full((self.size,), STOP, np.int32)
        finish[: self.count] = RUNNING
        budget = np.zeros((self.size,), np.int32)
        budget[: self.count] = budgets
        state = dataclasses.replace(
            state,
            length=jnp.asarray(starts),
            budget=jnp.asarray(budget),
            finish=jnp.asarray(finish),
            proposal=None,
            memory=None,
            counters=_zero_counters(self.size, self.draft_length),
        )
        logits = jnp.asarray(
            np.zeros((self.size, self._spec.target.vocab_size), np.float32)
        )
        state, logits = self._feed(state, logits, pending, starts)
        state, out = self._programs.begin(
            self._params,
            state,
            logits,
            self._requests,
            is_noisy(self._settings.variant),
            self._settings.policy,
        )
        if not holds_rows(self._settings.variant) and state.proposal is not None:
            # Greedy rounds carry no laws.
            proposal = dataclasses.replace(state.proposal, weights=None, offset=None)
            state = dataclasses.replace(state, proposal=proposal)
        self.state = state
        return self._receive(out)

    def launch(self) -> None:
        """Puts a round in flight."""
        self._launched += 1
        self.state, out = self._programs.round(
            self._params,
            self._owned(),
            self._requests,
            self._settings.variant,
            self._settings.extras,
            self._next_plan(),
        )
        self._flights.append(out)

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
        return self._receive(self._flights.popleft())

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
        jax.block_until_ready(self._flights)
        self._flights.clear()

    def _next_plan(self) -> Plan | None:
        """How wide the next round is, where the host decides that."""
        plan, settings = self._plan, self._settings
        if plan is None or not isinstance(settings.policy, Budget):
            return plan
        # The proposal that round r verifies was made in r - 1, maybe still in flight.
        older = max(self._launched - 2, 0)
        self._offers.pop(older - 1, None)
        waiting = np.zeros((self.size,), np.int64)
        waiting[: self.count] = [len(known) for known in self.tokens]
        offer = self._offers[older]
        if self._launched > 1:
            running = np.zeros((self.size,), bool)
            running[: self.count] = [reason == RUNNING for reason in self._finish]
            require_older(
                offer, waiting + len(self._flights), np.asarray(offer.live) & running
            )
        else:
            offer = dataclasses.replace(offer, values=np.ones_like(offer.values))
        assert settings.costs is not None
        total = total_on_host(offer, table_of(settings.costs, self.size))
        bucket = next((g for g in plan.buckets if g >= total), plan.buckets[-1])
        rows = jnp.asarray(np.int32(total))
        return Plan(None, rows, settings.policy, (bucket,))

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

    def _feed(
        self,
        state: DecodeState,
        logits: jax.Array,
        pending: list[list[int]],
        starts: np.ndarray,
    ) -> tuple[DecodeState, jax.Array]:
        """Feeds chunk by chunk; every chunk's window lies inside the cache.

        The smallest chunk is no longer than a tile, so it always fits.
        """
        lengths, done = starts.copy(), [0] * self.size
        sizes = Buckets().prefill
        while True:
            left = max(len(p) - d for p, d in zip(pending, done, strict=True))
            if left == 0:
                return state, logits
            at, slots = int(lengths.max()), slots_for(state.capacity)
            fits = [n for n in sizes if block_fits(at, n, state.capacity, slots)]
            width = Buckets.fit(left, fits) or fits[-1]
            chunk = np.zeros((self.size, width), np.int32)
            counts = np.zeros((self.size,), np.int32)
            for row, ids in enumerate(pending):
                part = ids[done[row] : done[row] + width]
                chunk[row, : len(part)] = part
                counts[row] = len(part)
                done[row] += len(part)
            state, logits = self._programs.feed(
                self._params, state, logits, jnp.asarray(chunk), jnp.asarray(counts)
            )
            lengths += counts

    def _receive(self, out: RoundOut) -> HostRound:
        wanted = (out.emitted, out.n_emitted, out.n_kept, out.n_drafts, out.finish)
        scores = out.logprobs if self._settings.extras.logprobs else None
        *arrays, scores, trace, offer = self._programs.fetch(
            (*wanted, scores, out.trace, out.offer)
        )
        if offer is not None:
            self._offers[self._launched - len(self._flights)] = offer
        emitted, counts, kept, drafted, finish = (
            x[: self.count].tolist() for x in arrays
        )
        ended = [reason != RUNNING for reason in self._finish]
        counts = [0 if e else c for e, c in zip(ended, counts, strict=True)]
        rows = [row[:count] for row, count in zip(emitted, counts, strict=True)]
        broken = [i for i, row in enumerate(rows) if row and min(row) < 0]
        if broken:
            raise ValueError(
                f"requests {broken} got logits without a finite maximum (NaN, inf, or "
                "every token excluded); check the weights and the filters"
            )
        position = [len(known) for known in self.tokens]
        for row, new in enumerate(rows):
            self.tokens[row].extend(new)
            self._budget[row] -= len(new)
            if not ended[row]:
                self._finish[row] = finish[row]
        logs = [[] for _ in rows]
        if scores is not None:
            logs = [s[:c] for s, c in zip(scores.tolist(), counts, strict=False)]

        def lists(x: np.ndarray | None) -> list[list[float]]:
            if x is None:
                return [[] for _ in rows]
            pairs = zip(x[: self.count].tolist(), drafted, strict=True)
            return [values[:count] for values, count in pairs]

        return HostRound(
            rows,
            kept,
            drafted,
            list(self._finish),
            logs,
            position,
            lists(trace and trace.confidence),
            lists(trace and trace.overlap),
        )


def _zero_counters(batch: int, draft_length: int):
    """Zero counters without compiling anything."""
    shapes = jax.eval_shape(lambda: new_counters(batch, draft_length))
    return jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), shapes)
