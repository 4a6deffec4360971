"""From a policy to a plan, checked before tracing."""

from __future__ import annotations

import jax
from jax.core import Tracer

from dspark_jax.config import require
from dspark_jax.decoding.requests import Variant, holds_rows
from dspark_jax.decoding.schedule import Plan
from dspark_jax.processes import spans
from dspark_jax.scheduling.cost_model import CostTable
from dspark_jax.scheduling.policy import Gate, Policy, Scheduled
from dspark_jax.settings import Fixed
from dspark_jax.spec import Spec


def policy_length(
    spec: Spec, policy: Policy | None, draft_length: int | None
) -> tuple[int, Scheduled | None]:
    """Drafts a round, and the policy unless all of them are verified.

    Raises:
      ValueError: no policy, a length that the draft does not have, two lengths, or a
        policy that needs confidences and a draft that gives none, or one that weighs
        times where several processes must decide alike.
    """
    if policy is None:
        return spec.check_draft_length(draft_length), None
    if not isinstance(policy, Fixed | Scheduled):
        raise ValueError(
            f"`policy` is {policy!r}; allowed: Fixed, Budget, EarlyStop, Threshold or "
            "Gate"
        )
    asked = policy.draft_length
    if draft_length is not None and asked not in (None, draft_length):
        raise ValueError(
            f"`draft_length` is {draft_length} but `policy` is {policy}; give one"
        )
    n = spec.check_draft_length(draft_length if asked is None else asked)
    if isinstance(policy, Scheduled) and n == 0:
        raise ValueError(
            f"`policy` is {policy} and there is nothing to verify; use Fixed(0), or a "
            "model with a draft"
        )
    if isinstance(policy, Fixed):
        return n, None
    if spec.one_by_one:
        raise ValueError(
            f"`policy` is {policy} and the model verifies `one_by_one`, which ends at "
            "the first draft that falls: there are no lengths to choose; use Fixed"
        )
    if spec.draft is None or not spec.draft.confidence:
        raise ValueError(
            f"`policy` is {policy} but the draft has no confidence head; use Fixed"
        )
    if policy.needs_costs and spans(spec.mesh):
        raise ValueError(
            f"`policy` is {policy} and weighs times, and `mesh` has devices of several "
            "processes, whose times differ; use Fixed or Threshold"
        )
    return n, policy


def make_plan(
    spec: Spec,
    policy: Scheduled,
    batch: int,
    draft_length: int,
    costs: CostTable | None,
    variant: Variant,
    rows: tuple[int, ...] | None = None,
) -> Plan:
    """The plan of all rounds, for lengths that are decided on the device.

    Args:
      spec: the model.
      policy: decides.
      batch: B.
      draft_length: n.
      costs: measured times.
      variant: what the programs can do.
      rows: row counts to keep to, see `shapes`; None: all of `row_buckets`.

    Raises:
      ValueError: costs that are missing, a gate that would bend sampling, or
        determinism where other lengths mean other random words.
    """
    if rows is not None:
        check_deterministic(policy, variant)
    if policy.needs_costs and costs is None:
        raise ValueError(
            f"`policy` is {policy} and weighs time; give `costs`, see `profile`"
        )
    if isinstance(policy, Gate) and policy.causal is False and holds_rows(variant):
        raise ValueError(
            "`policy` is Gate(causal=False): with tokens drawn at a temperature it "
            "would look at what it decides about, and bias them; leave `causal` out, "
            "or use greedy decoding or verification='shared_noise'"
        )
    return Plan(costs, None, policy, rows or row_buckets(batch, draft_length))


def check_deterministic(policy: Scheduled | None, variant: Variant) -> None:
    """Refuses lengths that follow timings where they change random words."""
    if policy is not None and holds_rows(variant):
        raise ValueError(
            f"`deterministic` with `policy` {policy} and tokens drawn at a "
            "temperature: the text depends on the lengths, and those on the machine's "
            "timing; use Fixed, or verification='shared_noise'"
        )


def row_buckets(batch: int, draft_length: int) -> tuple[int, ...]:
    """Row counts a scheduled round is compiled for: 1, 2, .. n + 1 a request.

    At least two rows: single ones are slow on CPU.
    """
    sizes = {max(2, batch * (j + 1)) for j in range(draft_length + 1)}
    return tuple(sorted(sizes))


def check_seeds(policy: Scheduled | None, variant: Variant, seeds: jax.Array) -> None:
    """Refuses equal seeds where requests decide about each other.

    Their drafts would be copies, and a draft's length would depend on itself.
    """
    if policy is None or not holds_rows(variant) or isinstance(seeds, Tracer):
        return
    rows = [tuple(row) for row in jax.device_get(seeds).tolist()]
    require(
        len(set(rows)) == len(rows),
        "seeds",
        "equal for some requests",
        f"different ones with {type(policy).__name__}, which lets requests share rows",
    )
