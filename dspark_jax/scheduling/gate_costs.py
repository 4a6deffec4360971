"""What a round of one request costs, by the number of drafts it verifies."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import require


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["draft_ms", "verify_ms", "plain_ms"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class GateCosts:
    """Times of one request's round; only their ratios matter.

    Attributes:
      draft_ms: float32[]. Drafting a block.
      verify_ms: float32[n + 1]. Verifying 0..n drafts; entry 0 is never read, because
        a round that verifies nothing is a plain step.
      plain_ms: float32[]. A step without drafts.
    """

    draft_ms: jax.Array
    verify_ms: jax.Array
    plain_ms: jax.Array


def measured_costs(
    draft_ms: float, verify_ms: Sequence[float], plain_ms: float
) -> GateCosts:
    """Costs from measurements.

    Args:
      draft_ms: of drafting a block.
      verify_ms: of verifying 1, 2, ..., n drafts.
      plain_ms: of a step without drafts.

    Raises:
      ValueError: a time that is negative or not finite, or a step that takes none.
    """
    times = [float(ms) for ms in verify_ms]
    _require_time("draft_ms", draft_ms, zero=True)
    _require_time("plain_ms", plain_ms, zero=False)
    for ms in times:
        _require_time("verify_ms", ms, zero=False)
    return GateCosts(
        draft_ms=jnp.float32(draft_ms),
        verify_ms=jnp.asarray([0.0, *times], jnp.float32),
        plain_ms=jnp.float32(plain_ms),
    )


def linear_costs(
    drafts: int,
    draft_ms: float = 196.0,
    verify_base_ms: float = 300.0,
    verify_slope_ms: float = 109.0,
    plain_ms: float = 303.0,
) -> GateCosts:
    """Costs of a verification that takes base + slope * drafts.

    The defaults are those of the published gate (one stream, experts in host memory).

    Raises:
      ValueError: see `measured_costs`.
    """
    require(drafts >= 0, "drafts", drafts, ">= 0")
    lengths = range(1, drafts + 1)
    times = [verify_base_ms + verify_slope_ms * n for n in lengths]
    return measured_costs(draft_ms, times, plain_ms)


def fit_verification(
    forwarded: Sequence[float], ms: Sequence[float]
) -> tuple[float, float]:
    """Base and slope *in drafts* from times measured by *forwarded tokens*.

    A verification of n drafts forwards n + 1 tokens. The least-squares line a + b t in
    tokens t is therefore (a + b) + b n in drafts.

    Args:
      forwarded: tokens of each measurement, the anchor included.
      ms: how long they took.

    Returns:
      (base, slope) for `linear_costs`.

    Raises:
      ValueError: fewer than two different token counts.
    """
    tokens, times = np.asarray(forwarded, np.float64), np.asarray(ms, np.float64)
    require(times.shape == tokens.shape, "ms", ms, f"{tokens.size} times")
    require(len(set(tokens)) > 1, "forwarded", forwarded, "two different counts")
    spread = tokens - tokens.mean()
    slope = float((spread * times).sum() / (spread * spread).sum())
    intercept = float(times.mean() - slope * tokens.mean())
    return intercept + slope, slope


def _require_time(name: str, ms: float, *, zero: bool) -> None:
    ok = math.isfinite(ms) and (ms > 0 or (zero and ms == 0))
    require(ok, name, ms, "finite and >= 0" if zero else "finite and > 0")
