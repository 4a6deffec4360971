"""Policies: how many drafted tokens each request of a round verifies.

Every policy drafts `draft_length` tokens and verifies a prefix of them. What it may
look at keeps sampling exact: whether draft j is verified must not depend on token j
or on anything drawn from it (specification of scheduling, section 8).

    policy      decides from
    Fixed       nothing
    Threshold   survivals up to draft j
    EarlyStop   survivals up to draft j, costs
    Budget      the total, and whether to draft, from the proposal before this one,
                costs; its division among requests from this one
    Gate        what it learned in earlier rounds, costs; this proposal as a whole, or
                with drawn tokens confidences up to draft j
"""

from __future__ import annotations

import dataclasses
import math

from dspark_jax.config import require
from dspark_jax.scheduling.gate import GateConfig
from dspark_jax.settings import Fixed


@dataclasses.dataclass(frozen=True)
class _Scheduled:
    """What the policies have in common.

    Attributes:
      draft_length: tokens drafted a round, the most that are verified; None is the
        draft's usual number.
    """

    draft_length: int | None = None

    def __post_init__(self) -> None:
        n = self.draft_length
        ok = n is None or (isinstance(n, int) and not isinstance(n, bool) and n >= 1)
        require(ok, "draft_length", n, "None or an int >= 1; use Fixed(0) for none")

    @property
    def needs_costs(self) -> bool:
        """Whether decisions weigh time."""
        return True

    @property
    def may_skip_drafting(self) -> bool:
        """Whether a round may go without a next proposal."""
        return False

    @property
    def minds_doubt(self) -> bool:
        """Whether the target's two highest logits matter."""
        return False


@dataclasses.dataclass(frozen=True)
class Budget(_Scheduled):
    """The total of rows with the most expected tokens a millisecond.

    Searched over the measured costs of all row counts, from survivals that are one
    proposal old, and shared out by the survivals of this one (specification of
    scheduling, sections 2 to 4). Where even the best total is not worth the time of a
    proposal, rounds go without, and try again every so often.
    """

    @property
    def may_skip_drafting(self) -> bool:
        """Always."""
        return True


@dataclasses.dataclass(frozen=True)
class EarlyStop(_Scheduled):
    """Admits drafts while each raises the speed (DSpark paper, Algorithm 1)."""


@dataclasses.dataclass(frozen=True)
class Threshold(_Scheduled):
    """Verifies the drafts whose chance to stand, all before them included, is enough.

    Attributes:
      survival: the least chance, in [0, 1].
    """

    survival: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        s = self.survival
        ok = isinstance(s, int | float) and math.isfinite(s) and 0 <= s <= 1
        require(ok, "survival", s, "[0, 1]")

    @property
    def needs_costs(self) -> bool:
        """Never."""
        return False


@dataclasses.dataclass(frozen=True)
class Gate(_Scheduled):
    """Learns how often drafts of a confidence stand, request by request.

    Rounds stop drafting where it does not pay, and try again every so often
    (specification of scheduling, section 10).

    Attributes:
      config: buckets, margin, forgetting.
      least_margin: do not draft where the two highest logits of the target's last row
        are closer than this; 0 is off, 4 is the published suggestion.
      causal: look at confidences up to draft j only. None does so where tokens are
        drawn, and must; False is refused there.
    """

    config: GateConfig = GateConfig()
    least_margin: float = 0.0
    causal: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        m = self.least_margin
        ok = isinstance(m, int | float) and math.isfinite(m) and m >= 0
        require(ok, "least_margin", m, "a finite number >= 0")
        require(
            self.causal in (None, True, False), "causal", self.causal, "a bool or None"
        )

    @property
    def may_skip_drafting(self) -> bool:
        """Always."""
        return True

    @property
    def minds_doubt(self) -> bool:
        """With a least margin."""
        return self.least_margin > 0


Scheduled = Budget | EarlyStop | Threshold | Gate
Policy = Fixed | Scheduled
