"""What a round costs: a measured curve, and what running rounds say beyond it.

    round = ms(size) + max(0, slope) size + sampler(n) + (draft(n), if it drafts)

with n requests and the smallest compiled size that holds their rows (specification of
scheduling, section 5). The draft's time stands apart: it is not paid by a round that
does not draft.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import numpy as np

from dspark_jax.config import require
from dspark_jax.scheduling.arrays import library
from dspark_jax.scheduling.budget import (
    Array,
    Curve,
    ms_by_total,
    ms_of,
    size_ms,
    smallest_size,
)
from dspark_jax.scheduling.estimators import ForwardSlope, SamplerTime


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["curve", "slope", "sampler_ms", "draft_ms"],
    meta_fields=[],
)
@dataclass(frozen=True, eq=False)
class CostTable:
    """A cost model at one moment, as arrays that a compiled policy reads.

    Shapes depend on the compiled sizes and the number of slots only, so a later table
    needs no new program.

    Attributes:
      curve: G sizes.
      slope: float32[], milliseconds a row on top of the curve; may be negative.
      sampler_ms: float32[R + 1], by the number of live requests.
      draft_ms: float32[R + 1], likewise.
    """

    curve: Curve
    slope: jax.Array | np.ndarray
    sampler_ms: jax.Array | np.ndarray
    draft_ms: jax.Array | np.ndarray

    def fixed_ms(self, requests: jax.Array | int, drafts: bool = True) -> jax.Array:
        """Milliseconds that the number of rows does not change: float32[].

        What `choose_total` and `ms_by_total` call `sampler_ms`.
        """
        xp = library(self.sampler_ms, self.draft_ms, requests)
        sampler = xp.asarray(self.sampler_ms)[requests]
        return sampler + xp.asarray(self.draft_ms)[requests] if drafts else sampler

    def round_ms(
        self, requests: Array | int, rows: Array | int, drafts: bool = True
    ) -> Array:
        """Milliseconds of a round: float32[...], infinite above the largest size.

        Args:
          requests: int32[], live requests, 0..R.
          rows: int32[...], rows in all.
          drafts: whether the round drafts.
        """
        times = size_ms(self.curve, self.slope, self.fixed_ms(requests, drafts))
        return ms_of(times, smallest_size(self.curve, rows))

    def plain_ms(self, requests: jax.Array | int) -> jax.Array:
        """Milliseconds of a step without drafts, one row a request: float32[]."""
        return self.round_ms(requests, requests, drafts=False)

    def ms_by_total(
        self, requests: jax.Array | int, totals: int, drafts: bool = True
    ) -> jax.Array:
        """Milliseconds of 0..totals - 1 rows, for `early_stop`: float32[totals]."""
        fixed = self.fixed_ms(requests, drafts)
        return ms_by_total(self.curve, self.slope, fixed, totals)


class CostModel:
    """A curve and the estimators that follow a running server.

    Attributes:
      curve: measured before the server ran.
      draft_ms: of one proposal, for as long as too few were observed.
      slope: of the rounds against the curve.
      sampler: what a round takes beside its forward pass and its draft.
      draft: what a proposal takes.
      follows: whether the host loop may report its rounds here.
    """

    def __init__(self, curve: Curve, *, draft_ms: float = 0.0, follows: bool = False):
        """Nothing observed yet: the curve is all there is.

        Raises:
          ValueError: `draft_ms` is not a finite number >= 0.
        """
        ok = bool(np.isfinite(draft_ms)) and draft_ms >= 0
        require(ok, "draft_ms", draft_ms, "a finite number >= 0")
        self.curve = curve
        self.draft_ms = float(draft_ms)
        self.slope = ForwardSlope()
        self.sampler = SamplerTime()
        self.draft = SamplerTime()
        self.follows = follows

    def observe(
        self,
        *,
        requests: int,
        rows: int,
        forward_ms: float,
        sampler_ms: float,
        draft_ms: float | None = None,
    ) -> None:
        """Takes in a finished round.

        Only rounds of a compiled size belong here, with the times of the device and
        without compilation; times must not depend on which tokens were drawn.

        Args:
          requests: live requests.
          rows: rows in all, without padding.
          forward_ms: of the verification's forward pass.
          sampler_ms: of what follows it, without the draft.
          draft_ms: of the proposal; None where the round did not draft.

        Raises:
          ValueError: no size holds the rows, a time is not a finite number >= 0.
        """
        place = self._place(rows)
        times = {"forward_ms": forward_ms, "sampler_ms": sampler_ms}
        if draft_ms is not None:
            times["draft_ms"] = draft_ms
        for name, ms in times.items():
            ok = bool(np.isfinite(ms)) and ms >= 0
            require(ok, name, ms, "a finite number >= 0")
        size = int(self.curve.sizes[place])
        self.slope.update(size, (forward_ms - float(self.curve.ms[place])) / size)
        self.sampler.update(requests, sampler_ms)
        if draft_ms is not None:
            self.draft.update(requests, draft_ms)

    def observe_round(
        self, *, requests: int, rows: int, drafts: bool, round_ms: float
    ) -> None:
        """Takes in a round of which only the whole time is known.

        What neither the curve nor the proposal explain is the same for every number
        of rows, as far as one can tell: it counts as the sampler's. A round is rarely
        shorter than the curve, and then says so by the slope.

        Args:
          requests: see `observe`.
          rows: likewise.
          drafts: whether the round made a proposal.
          round_ms: of the whole round on the device.
        """
        known = float(self.curve.ms[self._place(rows)])
        rest = round_ms - (self._draft(requests) if drafts else 0.0)
        self.observe(
            requests=requests,
            rows=rows,
            forward_ms=max(min(rest, known), 0.0),
            sampler_ms=max(rest - known, 0.0),
        )

    def round_ms(self, requests: int, rows: int, drafts: bool = True) -> float:
        """Milliseconds of a round, for reports: policies read the table.

        Raises:
          ValueError: no size holds the rows.
        """
        place = self._place(rows)
        forward = float(self.curve.ms[place])
        forward += max(0.0, self.slope.value()) * int(self.curve.sizes[place])
        rest = self.sampler.value(requests)
        return forward + rest + (self._draft(requests) if drafts else 0.0)

    def plain_ms(self, requests: int) -> float:
        """Milliseconds of a step without drafts, one row a request.

        Raises:
          ValueError: no size holds the rows.
        """
        return self.round_ms(requests, requests, drafts=False)

    def table(self, requests: int) -> CostTable:
        """What is known now, for up to that many live requests."""
        counts = range(requests + 1)
        return CostTable(
            curve=self.curve,
            slope=np.array(self.slope.value(), np.float32),
            sampler_ms=np.array([self.sampler.value(n) for n in counts], np.float32),
            draft_ms=np.array([self._draft(n) for n in counts], np.float32),
        )

    def _draft(self, requests: int) -> float:
        return self.draft.value(requests, default=self.draft_ms)

    def _place(self, rows: int) -> int:
        largest = int(self.curve.sizes[-1])
        require(0 <= rows <= largest, "rows", rows, f"0..{largest}, the largest size")
        return int(np.searchsorted(self.curve.sizes, rows))


Costs = CostModel | CostTable


def table_of(costs: Costs, requests: int) -> CostTable:
    """What is known now about rounds of up to `requests` live requests.

    Raises:
      ValueError: a table for fewer requests.
    """
    if isinstance(costs, CostModel):
        return costs.table(requests)
    known = len(costs.draft_ms) - 1
    require(known >= requests, "costs", f"a table for {known}", f"{requests} requests")
    return costs
