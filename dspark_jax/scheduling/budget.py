"""How many rows a round is worth: the budget search.

A round evaluates q_r = 1 + (verified drafts) rows of each of n requests, in all
B = sum q_r. The tokens to expect are n plus the survivals of the verified drafts.
Survivals never rise along a request, so for a fixed total the largest of them are
prefixes and promise the most: only the total has to be found (specification of
scheduling, sections 1 and 2).

Everything is float32 and rounds alike wherever the function is compiled, and in numpy
(see `arrays`). Sums are taken one by one; the one product that is added to something is
exact.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dspark_jax.config import require
from dspark_jax.scheduling.arrays import library
from pallas_kernels.allocate import allocate

Number = jax.Array | np.ndarray | float
# What `arrays.library` takes: of JAX, traced or not, or of numpy.
Array = Any

# Sizes up to here keep half of a slope's bits times a size exact, see `size_ms`.
LARGEST_SIZE = 4096


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["sizes", "ms"], meta_fields=[]
)
@dataclass(frozen=True, eq=False)
class Curve:
    """What a verification step costs, by the sizes that are compiled.

    Attributes:
      sizes: int32[G], strictly increasing. Rows of the compiled programs.
      ms: float32[G] > 0. Milliseconds of each, in any order: a larger program may be
        the faster one.
    """

    sizes: jax.Array | np.ndarray
    ms: jax.Array | np.ndarray


def curve(sizes: Sequence[int] | np.ndarray, ms: Sequence[float] | np.ndarray) -> Curve:
    """A checked `Curve`.

    Raises:
      ValueError: no sizes, sizes that are not strictly increasing integers in
        1..4096, another number of times, times that are not finite and > 0.

    Example:
      >>> curve([2, 4], [8.0, 10.0]).ms
      array([ 8., 10.], dtype=float32)
    """
    given = np.asarray(sizes)
    increasing = (
        given.ndim == 1
        and given.size > 0
        and np.issubdtype(given.dtype, np.integer)
        and bool(np.all(np.diff(given.astype(np.int64)) > 0))
        and 1 <= int(given[0]) <= int(given[-1]) <= LARGEST_SIZE
    )
    allowed = f"strictly increasing integers in 1..{LARGEST_SIZE}, at least one"
    require(increasing, "sizes", sizes, allowed)
    times = np.asarray(ms, np.float32)
    require(times.shape == given.shape, "ms", ms, f"{given.size} numbers, one a size")
    ok = bool(np.all(np.isfinite(times) & (times > 0)))
    require(ok, "ms", ms, "finite numbers > 0")
    return Curve(given.astype(np.int32), times)


def size_ms(curve: Curve, slope: Number, sampler_ms: Number) -> Array:
    """Milliseconds of a round in each compiled size: ms + max(0, slope) size + sampler.

    The slope multiplies the rows that run, padding included, and the curve is a lower
    bound: a negative slope counts as 0 (specification of scheduling, 2.4 and 5.2).

    Args:
      curve: G sizes.
      slope: float32[] or a number; milliseconds a row on top of the curve.
      sampler_ms: float32[] or a number >= 0; milliseconds that no size changes.

    Returns:
      float32[G].
    """
    xp = library(curve.sizes, curve.ms, slope, sampler_ms)
    over: Array = xp.asarray(slope, xp.float32)
    over = xp.where(over > 0, over, xp.float32(0.0))
    # A compiler may or may not round a product before it adds it, and does so by
    # what it knows when it compiles. Twelve bits times a size need no rounding.
    head = (over.view(xp.uint32) & np.uint32(0xFFFFF000)).view(xp.float32)
    sizes = xp.asarray(curve.sizes).astype(xp.float32)
    times = xp.asarray(curve.ms) + head * sizes + (over - head) * sizes
    return times + xp.asarray(sampler_ms, xp.float32)


def ms_by_total(
    curve: Curve,
    slope: Number,
    sampler_ms: Number,
    totals: int,
) -> Array:
    """Milliseconds of a round, by its rows: each total in the smallest size that fits.

    Args:
      curve: see there.
      slope: see `size_ms`.
      sampler_ms: see `size_ms`.
      totals: T >= 1, of which those above the largest size are infinite.

    Returns:
      float32[T] for 0 .. T - 1 rows.
    """
    rows = jnp.arange(totals, dtype=jnp.int32)
    return ms_of(size_ms(curve, slope, sampler_ms), smallest_size(curve, rows))


def ms_of(times: Array, place: Array) -> Array:
    """float32 of float32[G] times and int32 places; infinite behind the last."""
    xp = library(times, place)
    last = xp.minimum(place, times.size - 1)
    found = xp.asarray(times)[last]
    return xp.where(place < times.size, found, xp.float32(np.inf))


def smallest_size(curve: Curve, rows: Array) -> Array:
    """Which size holds so many rows: int32 places, G where none does."""
    if library(curve.sizes, rows) is np:
        return np.searchsorted(curve.sizes, rows).astype(np.int32)
    sizes = jnp.asarray(curve.sizes)
    return jnp.searchsorted(sizes, rows, method="compare_all").astype(jnp.int32)


def choose_total(
    values: Array,
    live: Array,
    curve: Curve,
    slope: Number,
    sampler_ms: Number,
) -> tuple[Array, Array]:
    """The total of rows with the most expected tokens a millisecond.

    Drafts are bought one by one, likeliest first. A total runs in the smallest size
    that holds it, and its score is

        (n + survivals bought) / (ms(size) + max(0, slope) size + sampler).

    The best score of all totals wins, so the search sees beyond a step of the curve;
    of equal ones the smaller total (specification of scheduling, section 2). Totals
    above the largest size are left out. A survival of 0 is never bought, even where
    the next size is the cheaper one: it may stand for a draft that does not exist.

    Where n itself is above the largest size, the answer is n with score 0: one row a
    request, outside of what was compiled.

    Args:
      values: float32[B, n]. Survival of each draft, see `pallas_kernels.allocate`. 0
        where a draft cannot be emitted, also at the end of a request. NaN counts as 0;
        others are clamped to [0, 1].
      live: bool[B]. False for an empty slot, which takes no row at all.
      curve: see there.
      slope: see `size_ms`.
      sampler_ms: see `size_ms`.

    Returns:
      int32[]: the total, between the live requests and those plus their drafts.
      float32[]: its score, in tokens a millisecond.

    Raises:
      ValueError: not float32[B, n] or bool[B].
    """
    require_batch(values, live)
    xp = library(values, live, curve.ms, slope, sampler_ms)
    requests = live.sum(dtype=xp.int32)
    queue = _falling(cleaned(values, live).reshape(-1))
    expected = bought_one_by_one(requests, queue)
    totals = requests + xp.arange(expected.size, dtype=xp.int32)
    place = smallest_size(curve, totals)
    times = size_ms(curve, slope, sampler_ms)
    score = tokens_a_ms(expected, times, place)
    worth_it = xp.concatenate([xp.ones(1, bool), queue > 0])
    # The first of equal maxima is the smaller total.
    score = xp.where(worth_it & (place < times.size), score, xp.float32(-1.0))
    best = xp.argmax(score).astype(xp.int32)
    return requests + best, xp.maximum(score[best], xp.float32(0.0))


def share(values: Array, live: Array, total: Array) -> Array:
    """Rows of each request when `total` rows are shared by value.

    `pallas_kernels.allocate.allocate` for a batch with empty slots.

    Args:
      values: float32[B, n], as in `choose_total`; here a 0 takes part, so that the sum
        is the total: a total chosen from other values may pay for drafts of value 0.
      live: bool[B].
      total: int32[].

    Returns:
      int32[B]: 1..n + 1 where live, else 0. Their sum is `total`, if that lies
      between the live requests and those plus their drafts.

    Raises:
      ValueError: not float32[B, n] or bool[B].
    """
    require_batch(values, live)
    # Behind every draft of a live request, those of value 0 too.
    values = jnp.where(live[:, None], cleaned(values, live), -1.0)
    empty = (~live).astype(jnp.int32)
    return allocate(values, jnp.asarray(total, jnp.int32) + empty.sum()) - empty


def cleaned(values: Array, live: Array) -> Array:
    """Values in [0, 1]: float32[B, n], 0 for NaN and in empty slots."""
    xp = library(values, live)
    # NaN is not > 0.
    counted = (values > 0) & live[:, None]
    return xp.where(counted, xp.minimum(values, xp.float32(1.0)), xp.float32(0.0))


def bought_one_by_one(requests: Array, queue: Array) -> Array:
    """Expected tokens after each draft of a queue: float32[K + 1] from float32[K].

    Sums are taken in the order of the queue, since other orders, those of a parallel
    sum among them, round otherwise.
    """
    start = requests.astype(np.float32)
    if library(requests, queue) is np:
        return np.cumsum(np.concatenate([start[None], queue]), dtype=np.float32)

    def buy(expected: jax.Array, value: jax.Array) -> tuple[Array, Array]:
        expected = expected + value
        return expected, expected

    _, bought = lax.scan(buy, start, queue, unroll=8)
    return jnp.concatenate([start[None], bought])


def tokens_a_ms(expected: Array, times: Array, place: Array) -> Array:
    """Scores: float32[K] of float32[K] tokens, float32[G] times and int32[K] places.

    A place beyond the last counts as the last.
    """
    if library(expected, times, place) is np:
        return expected / times[np.minimum(place, times.size - 1)]
    # Behind the barrier a compiler does not see that a divisor is known or that one
    # divides everything; it would multiply by a rounded reciprocal instead.
    times = jnp.asarray(times)
    chosen = lax.optimization_barrier(times[jnp.minimum(place, times.size - 1)])
    return expected / chosen


def _falling(values: Array) -> Array:
    """Sorted, largest first; no negative number, no NaN.

    Such floats are in the order of their bits, and integers are sorted several times
    faster.
    """
    if library(values) is np:
        return np.sort(values)[::-1]
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return lax.bitcast_convert_type(-lax.sort(-bits, is_stable=False), jnp.float32)


def require_batch(values: Array, live: Array) -> None:
    """Raises ValueError unless float32[B, n] and bool[B]."""
    ok = values.ndim == 2 and values.dtype == jnp.float32
    require(ok, "values", f"{values.dtype}{list(values.shape)}", "float32[B, n]")
    ok = live.shape == values.shape[:1] and live.dtype == jnp.bool_
    require(ok, "live", f"{live.dtype}{list(live.shape)}", f"bool[{values.shape[0]}]")
