"""Algorithm 1 of the DSpark paper: the prefix scheduler that stops early.

It takes drafts in the order of their survivals and stops at the first that does not
raise the expected tokens a millisecond. What it admits depends on admitted prefixes
only, so it may read the confidences of the drafts it decides about without biasing
what is sampled (specification of scheduling, sections 7 and 8). The price: a step of
the cost curve ends it, where `budget.choose_total` would look beyond.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax.config import require
from dspark_jax.scheduling.budget import (
    bought_one_by_one,
    cleaned,
    require_batch,
    tokens_a_ms,
)


def early_stop(values: jax.Array, live: jax.Array, ms_by_total: jax.Array) -> jax.Array:
    """Drafts to verify, by request.

    With a_1 >= a_2 >= ... the survivals > 0 of all requests, equal ones by position
    and then by request, and theta_k = (n + a_1 + .. + a_k) / ms(n + k), the first k
    with theta_{k+1} <= theta_k drafts are verified (DSpark paper, Algorithm 1).

    Args:
      values: float32[B, n]. Survival of each draft, never rising along a row, see
        `pallas_kernels.allocate`; 0 where a draft cannot be emitted. NaN counts as 0;
        others are clamped to [0, 1].
      live: bool[B]. False for an empty slot, which takes no row at all.
      ms_by_total: float32[T] > 0. Milliseconds of a round of exactly that many rows;
        entry 0 is not read. No total of T or more is chosen. See `ms_by_total` of
        `dspark_jax.scheduling.budget` for compiled sizes.

    Returns:
      int32[B] in 0..n. Rows are one more for each live request.

    Raises:
      ValueError: not float32[B, n], bool[B] or float32[T].
    """
    require_batch(values, live)
    ok = ms_by_total.ndim == 1 and ms_by_total.dtype == jnp.float32
    found = f"{ms_by_total.dtype}{list(ms_by_total.shape)}"
    require(ok and ms_by_total.size > 0, "ms_by_total", found, "float32[T], T >= 1")
    requests = live.sum(dtype=jnp.int32)
    # Position before request: a draft is not taken before those it stands on, and
    # equal ones spread over the requests.
    by_position = cleaned(values, live).T.reshape(-1)
    bits = lax.bitcast_convert_type(by_position, jnp.int32)
    places = jnp.arange(by_position.size, dtype=jnp.int32)
    # The place is what makes the order of equal ones; stability keeps it.
    falling, order = lax.sort((-bits, places), num_keys=1, is_stable=True)
    queue = lax.bitcast_convert_type(-falling, jnp.float32)
    expected = bought_one_by_one(requests, queue)
    totals = requests + jnp.arange(expected.size, dtype=jnp.int32)
    times = jnp.asarray(ms_by_total)
    theta = tokens_a_ms(expected, times, totals)
    improves = (theta[1:] > theta[:-1]) & (totals[1:] < times.size) & (queue > 0)
    stopped = jnp.concatenate([~improves, jnp.ones(1, bool)])
    admitted = jnp.argmax(stopped).astype(jnp.int32)
    rank = jnp.zeros_like(places).at[order].set(places)
    wins = rank.reshape(values.shape[::-1]) < admitted
    return wins.sum(0, dtype=jnp.int32)
