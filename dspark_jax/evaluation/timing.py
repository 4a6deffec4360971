"""Where a round's time goes: on the device, and on the host between rounds.

The host loop keeps a second round in flight. A cycle is the time from one round's
results to the next one's; a round on the device is timed by launching many without
reading anything in between. What a cycle takes longer is the host's share.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from typing import Any

import jax
import numpy as np

from dspark_jax.decoding.batch import Batch, Settings
from dspark_jax.decoding.extras import NOTHING, Extras
from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.publishing import RoundOut
from dspark_jax.decoding.requests import Requests, Variant, pack_requests
from dspark_jax.decoding.schedule import Plan
from dspark_jax.decoding.state import DecodeState
from dspark_jax.evaluation.machine import ReadProbe
from dspark_jax.model import Model
from dspark_jax.models.params import Tree, flatten, is_stacked
from dspark_jax.scheduling.policy import Scheduled
from dspark_jax.settings import SamplingParams

# (B, capacity, draft length, variant): a round program.
Key = tuple[int, int, int, Variant]
ROUNDS, REPEATS, PROMPT = 12, 7, 32


class TimedPrograms(Programs):
    """A compile table that notes when results arrive.

    Cycles in which something was compiled are left out.

    Attributes:
      inner: the same table without the clock.
      cycles: seconds from one round's results to the next one's, by program.
      busy: what of that the host did not spend waiting for results, by program.
      calls: seconds that a round's call took, by program.
    """

    def __init__(self, programs: Programs):
        """Shares what `programs` has compiled."""
        self.inner = programs
        self.__dict__.update(programs.__dict__)
        self.clear()

    def clear(self) -> None:
        """Forgets all times."""
        self.cycles: dict[Key, list[float]] = {}
        self.busy: dict[Key, list[float]] = {}
        self.calls: dict[Key, list[float]] = {}
        self._flying: deque[Key] = deque()
        self._arrived: tuple[float, float] | None = None

    def begin(
        self,
        params: Tree,
        state: DecodeState,
        logits: jax.Array,
        requests: Requests,
        noisy: bool = False,
        policy: Scheduled | None = None,
    ) -> tuple[DecodeState, RoundOut]:
        """See `Programs.begin`; another request starts."""
        self._flying.clear()
        self._arrived = None
        return super().begin(params, state, logits, requests, noisy, policy)

    def round(
        self,
        params: Tree,
        state: DecodeState,
        requests: Requests,
        variant: Variant,
        extras: Extras,
        plan: Plan | None = None,
        bucket: int | None = None,
    ) -> tuple[DecodeState, RoundOut]:
        """See `Programs.round`; rounds that follow a plan are not timed."""
        if plan is not None:
            return super().round(params, state, requests, variant, extras, plan)
        drafts = state.counters.kept.shape[1]
        key: Key = (state.anchor.shape[0], state.capacity, drafts, variant)
        compiled, began = self.seconds, time.perf_counter()
        result = super().round(params, state, requests, variant, extras, bucket=bucket)
        if self.seconds == compiled:
            self.calls.setdefault(key, []).append(time.perf_counter() - began)
        self._flying.append(key)
        return result

    def fetch(self, results: Any) -> Any:
        """See `Programs.fetch`."""
        asked = time.perf_counter()
        arrays = super().fetch(results)
        if self._flying:
            key, now = self._flying.popleft(), time.perf_counter()
            if self._arrived and self._arrived[1] == self.seconds:
                self.cycles.setdefault(key, []).append(now - self._arrived[0])
                self.busy.setdefault(key, []).append(asked - self._arrived[0])
            self._arrived = (now, self.seconds)
        return arrays


def round_times(model: Model) -> tuple[list[dict[str, Any]], float]:
    """Times every program that `model.programs` saw, taking turns with memory reads.

    Returns:
      (entries, bandwidth): one entry a program, in milliseconds; `step_ms` is a
      round without drafting, the rows' evaluation and verification. Bytes a second
      that memory is read at.
    """
    timed = model.programs
    assert isinstance(timed, TimedPrograms), "time a model with TimedPrograms"
    cycles, calls = timed.cycles, timed.calls
    alone = dataclasses.replace(model, programs=timed.inner)
    rounds = {key: RoundChain(alone, key, drafting=True) for key in cycles}
    steps = {key: RoundChain(alone, key, drafting=False) for key in cycles if key[2]}
    probe = ReadProbe()
    for _ in range(REPEATS):
        for one in (probe, *rounds.values(), *steps.values()):
            one.run()
    entries = []
    for key, times in sorted(cycles.items()):
        device = statistics.median(rounds[key].seconds)
        step = statistics.median((steps if key[2] else rounds)[key].seconds)
        entries.append(
            {
                "draft_length": key[2],
                "capacity": key[1],
                "variant": key[3],
                "rounds": len(times),
                "round_ms": _ms(statistics.median(times)),
                "round_ms_best": _ms(min(times)),
                "device_ms": _ms(device),
                "step_ms": _ms(step),
                "gap_ms": _ms(statistics.median(times) - device),
                "host_ms": _ms(statistics.median(timed.busy[key])),
                "call_ms": _ms(statistics.median(calls[key])),
            }
        )
    return entries, probe.bandwidth


class RoundChain:
    """Rounds launched one after another, two in flight, nothing read in between.

    Attributes:
      seconds: of a round, one entry a run.
    """

    def __init__(self, model: Model, key: Key, drafting: bool):
        """Compiles what is needed and runs it once."""
        batch, capacity, n, variant = key
        self._model = model
        self._variant: Variant = variant
        one = SamplingParams(temperature=0 if variant == "greedy" else 1, stop_ids=())
        seeds = np.zeros((batch, 2), np.uint32)
        self._requests = pack_requests([one] * batch, seeds, ())
        held = Batch(
            model.spec, model.params, model.programs, self._requests, batch, capacity,
            n, Settings(variant, NOTHING),
        )  # fmt: skip
        prompt = list(range(min(PROMPT, capacity // 2)))
        held.start([prompt] * batch, [capacity] * batch)
        assert held.state is not None
        self._rounds = max(1, min(ROUNDS, (capacity - len(prompt)) // (n + 1) - 1))
        self._state, self._programs = held.state, model.programs
        if not drafting:
            # Without the draft's cache a round makes no proposal; the one at hand
            # is verified again and again.
            self._state = dataclasses.replace(self._state, draft=None)
            self._programs = Programs(model.spec, is_stacked(model.params["target"]))
        self._first = {
            name: np.asarray(getattr(self._state, name))
            for name in ("length", "budget", "finish")
        }
        self.seconds: list[float] = []
        self.run()
        self.seconds.clear()

    def run(self) -> None:
        """Times the rounds, from the same position each time."""
        first = {name: jax.device_put(x) for name, x in self._first.items()}
        state, out = dataclasses.replace(self._state, **first), None
        began = time.perf_counter()
        for _ in range(self._rounds):
            earlier = out
            state, out = self._programs.round(
                self._model.params, state, self._requests, self._variant, NOTHING
            )
            jax.block_until_ready(earlier)
        jax.block_until_ready(out)
        self.seconds.append((time.perf_counter() - began) / self._rounds)
        self._state = state


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def plain_step_bytes(model: Model) -> int:
    """Weight bytes that a plain step reads: all but an embedding table of its own."""
    leaves = flatten(model.params["target"])
    total = sum(leaf.nbytes for leaf in leaves.values())
    if "lm_head" in model.params["target"]:
        total -= leaves[("embed", "weight")].nbytes
    return total
