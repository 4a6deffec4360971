"""Measuring the curve before a server runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from dspark_jax.config import require
from dspark_jax.scheduling.budget import Curve, curve


def trimmed_mean(measured: Sequence[float], trim: int = 1) -> float:
    """The mean without the `trim` smallest and the `trim` largest.

    Raises:
      ValueError: nothing would be left.

    Example:
      >>> trimmed_mean([9, 10, 11, 12, 40])
      11.0
    """
    require(
        0 <= trim and 2 * trim < len(measured),
        "trim",
        trim,
        f"0 or more, less than half of the {len(measured)} measures",
    )
    kept = sorted(measured)[trim : len(measured) - trim]
    return sum(kept) / len(kept)


def take_turns(
    run: Mapping[int, Callable[[], object]],
    warmup: int = 1,
    measures: int = 5,
    trim: int = 1,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Times compiled programs, the largest first, over and over.

    The largest first, because it is the one that may not fit. In turns, so that a slow
    moment of the machine falls on all of them. A trimmed mean of a few runs each
    (specification of scheduling, section 5.1).

    Args:
      run: by size, a call that runs one step of so many rows and returns its arrays.
      warmup: calls of each size that are not timed; compilation happens there.
      measures: calls of each size that are.
      trim: how many of these are left out at either end.
      clock: in seconds.

    Returns:
      Milliseconds by size, increasing.

    Raises:
      ValueError: no sizes, `warmup` < 0, nothing left after trimming.
    """
    require(len(run) > 0, "run", run, "one call or more, by size")
    require(warmup >= 0, "warmup", warmup, ">= 0")
    require(
        2 * trim < measures, "measures", measures, f"more than 2 x trim = {2 * trim}"
    )
    order = sorted(run, reverse=True)
    for size in order:
        for _ in range(warmup):
            jax.block_until_ready(run[size]())
    measured: dict[int, list[float]] = {size: [] for size in reversed(order)}
    for _ in range(measures):
        for size in order:
            start = clock()
            # A call comes back before its arrays are there.
            jax.block_until_ready(run[size]())
            measured[size].append(1e3 * (clock() - start))
    return {size: trimmed_mean(ms, trim) for size, ms in measured.items()}


def profile_curve(
    run: Mapping[int, Callable[[], object]],
    warmup: int = 1,
    measures: int = 5,
    trim: int = 1,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Curve:
    """The curve of what `take_turns` measures.

    Raises:
      ValueError: as there, a size that `curve` does not allow, a clock that did not
        move.
    """
    times = take_turns(run, warmup, measures, trim, clock=clock)
    return curve(np.array(list(times)), list(times.values()))
