"""Drafting again from time to time where it was switched off.

Without drafts nothing is learned about drafts. So every k-th round drafts anyway, and
k is large enough for the lost time to stay below a share of all time.
"""

from __future__ import annotations

import jax

from dspark_jax.config import require
from dspark_jax.scheduling.arrays import library
from dspark_jax.scheduling.gate_costs import GateCosts

SHARE = 0.01
# A period that no request lives to see.
_NEVER = 2.0**30


def probe_period(costs: GateCosts, drafts: int, share: float = SHARE) -> jax.Array:
    """The fewest rounds between two probes that cost at most `share` of the time.

    A probe takes draft + verify(n) - plain longer than the step that it replaces. It
    is charged as if no draft ever stood: k * plain * share >= that much. The division
    is in float32; the share can be exceeded by its rounding.

    Args:
      costs: see there.
      drafts: how many a probe verifies; static.
      share: of the time of plain decoding, in (0, 1]; static.

    Returns:
      int32[], at least 1; 1 where drafting is no slower than a plain step.

    Raises:
      ValueError: drafts that `costs` do not cover, or a share outside of (0, 1].
    """
    covered = costs.verify_ms.shape[0] - 1
    require(1 <= drafts <= covered, "drafts", drafts, f"1..{covered}")
    require(0 < share <= 1, "share", share, "(0, 1]")
    extra = costs.draft_ms + costs.verify_ms[drafts] - costs.plain_ms
    xp = library(extra)
    period = xp.ceil(extra / (share * costs.plain_ms))
    return xp.clip(period, 1.0, _NEVER).astype(xp.int32)


def is_probe(rounds: jax.Array, period: jax.Array | int) -> jax.Array:
    """Whether a round is a probe: the last of every `period` rounds.

    A function of the counter alone, so that it says nothing about any token. Among the
    first R rounds there are floor(R / period) probes: the share holds at every moment
    and not only in the long run.

    Args:
      rounds: int32[...]. Rounds before this one. With the batch's counter rather than
        one of each request, requests probe in the same round and share its draft.
      period: int32[], or a number, from `probe_period`.

    Returns:
      bool[...].
    """
    xp = library(rounds, period)
    period = xp.asarray(period, xp.int32)
    return xp.mod(rounds, period) == period - 1
