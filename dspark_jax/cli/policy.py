"""The option `--policy`, and the times that policies weigh."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from dspark_jax.model import Model
from dspark_jax.profile import profile
from dspark_jax.scheduling.cost_model import CostModel
from dspark_jax.scheduling.policy import (
    Budget,
    EarlyStop,
    Gate,
    Policy,
    Scheduled,
    Threshold,
)
from dspark_jax.settings import Fixed, SamplingParams

Name = Literal["fixed", "budget", "early-stop", "threshold", "gate"]
PolicyOption = Annotated[
    Name,
    typer.Option(
        "--policy",
        help="How many drafts are verified: all (fixed), or by confidence and cost.",
    ),
]

KINDS: dict[str, type[Scheduled]] = {
    "budget": Budget,
    "early-stop": EarlyStop,
    "threshold": Threshold,
    "gate": Gate,
}


def policy_of(
    name: Name, model: Model, draft_length: int | None, sampling: SamplingParams
) -> tuple[Policy, CostModel | None]:
    """A policy, and measured times if it weighs any.

    Raises:
      ValueError: nothing to choose from.
    """
    if name == "fixed":
        return Fixed(draft_length), None
    policy = KINDS[name](draft_length)
    if not policy.needs_costs:
        return policy, None
    return policy, profile(model, draft_length=draft_length, sampling=sampling)
