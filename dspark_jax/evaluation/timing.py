"""Where a round's time goes: on the device, and on the host between rounds."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax

from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.publishing import RoundOut
from dspark_jax.decoding.requests import Requests, Variant
from dspark_jax.decoding.state import DecodeState
from dspark_jax.model import Model
from dspark_jax.models.params import Tree, flatten

# (B, capacity, draft length, variant): a round program.
Key = tuple[int, int, int, str]


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of one round.

    Attributes:
      total: from the call to the arrival of its results.
      dispatch: from the call to its return; the device has the work then.
      gap: between the previous round's results and this call: fetching them,
        text, stop strings. None for the first round after a prefill.
    """

    total: float
    dispatch: float
    gap: float | None


class TimedPrograms(Programs):
    """A compile table that times every round.

    Each round is waited for, which the host loop does anyhow. Rounds that
    compiled are left out.

    Attributes:
      times: by program.
    """

    def __init__(self, programs: Programs):
        """Shares what `programs` has compiled."""
        self.__dict__.update(programs.__dict__)
        self.times: dict[Key, list[RoundTimes]] = {}
        self._arrived: float | None = None

    def begin(
        self, params: Tree, state: DecodeState, logits: jax.Array, requests: Requests
    ) -> tuple[DecodeState, RoundOut]:
        """See `Programs.begin`; another request starts."""
        self._arrived = None
        return super().begin(params, state, logits, requests)

    def round(
        self,
        params: Tree,
        state: DecodeState,
        requests: Requests,
        variant: Variant,
        logprobs: bool,
    ) -> tuple[DecodeState, RoundOut]:
        """See `Programs.round`."""
        drafts = state.counters.kept.shape[1]
        key = (state.anchor.shape[0], state.capacity, drafts, variant)
        compiled = self.seconds
        began = time.perf_counter()
        result = super().round(params, state, requests, variant, logprobs)
        dispatched = time.perf_counter()
        jax.block_until_ready(result)
        arrived = time.perf_counter()
        if self.seconds == compiled:
            gap = None if self._arrived is None else began - self._arrived
            one = RoundTimes(arrived - began, dispatched - began, gap)
            self.times.setdefault(key, []).append(one)
        self._arrived = arrived
        return result

    def report(self) -> list[dict[str, Any]]:
        """One entry a program, in milliseconds, JSON-ready."""
        return [
            {
                "draft_length": key[2],
                "capacity": key[1],
                "variant": key[3],
                "rounds": len(times),
                "round_ms": _ms(statistics.median(t.total for t in times)),
                "round_ms_best": _ms(min(t.total for t in times)),
                **_host(times),
            }
            for key, times in sorted(self.times.items())
        ]


def _host(times: list[RoundTimes]) -> dict[str, float | None]:
    """Medians of the host's share; the device waits during both parts of it."""
    gaps = [t.gap for t in times if t.gap is not None]
    both = [t.gap + t.dispatch for t in times if t.gap is not None]
    return {
        "host_ms": _ms(statistics.median(both)) if both else None,
        "gap_ms": _ms(statistics.median(gaps)) if gaps else None,
        "dispatch_ms": _ms(statistics.median(t.dispatch for t in times)),
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def plain_step_bytes(model: Model) -> int:
    """Weight bytes that a plain step reads: all but an embedding table of its own."""
    leaves = flatten(model.params["target"])
    total = sum(leaf.nbytes for leaf in leaves.values())
    if not model.spec.target.tie_embeddings:
        total -= leaves[("embed", "weight")].nbytes
    return total
