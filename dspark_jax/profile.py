"""What rounds of a model cost on this machine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from dspark_jax.config import require
from dspark_jax.decoding.batch import Batch, Settings
from dspark_jax.decoding.extras import NOTHING
from dspark_jax.decoding.plans import row_buckets
from dspark_jax.decoding.requests import Variant, pack_requests, variant_of
from dspark_jax.decoding.schedule import Plan
from dspark_jax.evaluation.machine import hardware
from dspark_jax.model import Model
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_cache import Measured, cached_costs, curve_key
from dspark_jax.scheduling.cost_model import CostModel
from dspark_jax.scheduling.policy import Budget
from dspark_jax.scheduling.profiling import take_turns
from dspark_jax.settings import Buckets, SamplingParams

logger = logging.getLogger(__name__)

# Rounds a measurement runs, so that launching is hidden as it is in use.
CHAIN = 4
PROMPT = 32


def profile(
    model: Model,
    *,
    batch: int = 1,
    draft_length: int | None = None,
    sampling: SamplingParams | None = None,
    capacity: int = 512,
    cache: str | Path | None = None,
) -> CostModel:
    """Times rounds of every row count, for policies that weigh time.

    Programs that `generate` uses with `Budget` are compiled and run on the way; with
    other policies one more is compiled at their first use. Each time is a trimmed mean
    of five, taken in turns (specification of scheduling, section 5.1).

    Args:
      model: with a draft.
      batch: requests decoded together; the batch bucket that holds them is measured.
      draft_length: drafts a round, 1..gamma; None is the draft's usual number.
      sampling: as the requests will have; default greedy.
      capacity: cache positions of a request.
      cache: file that keeps the times; times of another device, model or version are
        measured anew.

    Returns:
      A cost model, to be given to `generate` as `costs`. It follows what rounds take
      there under `Budget`, where no text can depend on it: greedily and with shared
      noise.

    Raises:
      ValueError: a model without a draft, or numbers out of range.

    Example:
      >>> import dspark_jax as dspark
      >>> model = dspark.testing.tiny_model()
      >>> costs = dspark.profile(model, draft_length=2, capacity=128)
      >>> costs.curve.sizes.tolist()
      [2, 3]
    """
    spec = model.spec
    n = spec.check_draft_length(draft_length)
    require(n >= 1, "draft_length", n, "1..gamma: there is nothing to choose from")
    require(isinstance(batch, int) and batch >= 1, "batch", batch, "int >= 1")
    size = Buckets.fit(batch, Buckets().batch) or batch
    capacity = min(
        Buckets.fit(capacity, Buckets().capacity) or capacity, spec.target.max_position
    )
    least = PROMPT + (CHAIN + 1) * (n + 1)
    require(capacity >= least, "capacity", capacity, f">= {least}")
    sampling = sampling or SamplingParams()

    def measure() -> Measured:
        return _measure(model, size, n, sampling, capacity)

    if cache is None:
        found = measure()
    else:
        assert spec.draft is not None
        fields = {
            "machine": hardware()["device"],
            "target": repr(spec.target),
            "draft": repr(spec.draft),
            "cache_dtype": spec.cache_dtype,
            "implementation": spec.implementation_here,
            "mesh": repr(spec.mesh),
            "batch": size,
            "draft_length": n,
            "capacity": capacity,
            "variant": variant_of([sampling]),
        }
        found = cached_costs(cache, curve_key(fields, row_buckets(size, n)), measure)
    return CostModel(found.curve, draft_ms=found.draft_ms, follows=True)


def _measure(
    model: Model, size: int, n: int, sampling: SamplingParams, capacity: int
) -> Measured:
    rounds = _Rounds(model, size, n, sampling, capacity)
    buckets = row_buckets(size, n)
    runs: dict[int, Callable[[], object]] = {
        rows: rounds.of(max(rows, size), rows) for rows in buckets
    }
    # One row a request, with a proposal and without: what a proposal takes.
    runs[0] = rounds.of(size, buckets[0], drafts=False)
    ms = {rows: total / CHAIN for rows, total in take_turns(runs).items()}
    draft_ms = max(ms[buckets[0]] - ms[0], 0.0)
    times = [max(ms[rows] - draft_ms, 1e-3) for rows in buckets]
    for rows, time in zip(buckets, times, strict=True):
        logger.info("%d rows: %.2f ms", rows, time)
    logger.info("drafting: %.2f ms", draft_ms)
    return Measured(curve(buckets, times), draft_ms)


class _Rounds:
    """A chain of rounds from the same position again and again."""

    def __init__(
        self, model: Model, size: int, n: int, sampling: SamplingParams, capacity: int
    ):
        """Prefills `size` requests."""
        self._model, self._n = model, n
        never = dataclasses.replace(sampling, stop_ids=(), seed=None)
        seeds = np.arange(2 * size, dtype=np.uint32).reshape(size, 2)
        self._requests = pack_requests([never] * size, seeds, ())
        self._variant: Variant = variant_of([sampling])
        policy = Budget() if n else None
        # Totals are given by hand: nothing is weighed yet.
        free = CostModel(curve([size], [1.0]))
        held = Batch(
            model.spec,
            model.params,
            model.programs,
            self._requests,
            size,
            capacity,
            n,
            Settings(self._variant, NOTHING, policy, free if n else None),
        )
        held.start([list(range(PROMPT))] * size, [capacity] * size)
        assert held.state is not None
        self._state = held.state
        self._first = {
            name: np.asarray(getattr(held.state, name))
            for name in ("length", "budget", "finish")
        }

    def of(self, total: int, bucket: int, drafts: bool = True) -> Callable[[], object]:
        """A chain of rounds of that many rows."""
        rows, drafting = jax.numpy.int32(total), jax.numpy.bool_(drafts)
        plan = Plan(None, rows, Budget(), (bucket,), drafting)
        return lambda: self.run(plan)

    def run(self, plan: Plan) -> object:
        """Launches a chain; returns the last round's results."""
        first = {name: jax.device_put(x) for name, x in self._first.items()}
        state, out = dataclasses.replace(self._state, **first), None
        for _ in range(CHAIN):
            state, out = self._model.programs.round(
                self._model.params, state, self._requests, self._variant, NOTHING, plan
            )
        self._state = state
        return out
