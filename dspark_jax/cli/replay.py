"""`replay`: recorded rounds under other policies."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dspark_jax.cli.common import (
    CacheOption,
    DraftOption,
    ModelOption,
    load_model,
    one_line_errors,
    working,
)
from dspark_jax.cli.policy import KINDS
from dspark_jax.evaluation import held_out
from dspark_jax.generate import generate
from dspark_jax.profile import profile
from dspark_jax.scheduling.policy import Policy
from dspark_jax.scheduling.replay import (
    Score,
    joined,
    load_recording,
    record,
    replay,
    save_recording,
)
from dspark_jax.settings import Fixed


def replay_command(
    log: Annotated[Path, typer.Argument(help="The recording, a file of JSON lines.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="fixed, budget, early-stop, threshold, gate; default: all."),
    ] = None,
    make: Annotated[
        bool, typer.Option("--record", help="Make the recording first.")
    ] = False,
    model: ModelOption = "smollm2-135m",
    draft: DraftOption = "auto",
    batch: Annotated[int, typer.Option(help="Requests decoded together.")] = 1,
    prompts: Annotated[int, typer.Option(help="Prompts per domain.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    cache: CacheOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Confidences without their calibration.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score policies on recorded rounds, without running the model again."""
    with one_line_errors():
        names = policy or ["fixed", *KINDS]
        unknown = sorted(set(names) - {"fixed", *KINDS})
        if unknown:
            allowed = ", ".join(["fixed", *KINDS])
            raise ValueError(f"`--policy` is {', '.join(unknown)}; allowed: {allowed}")
        if make:
            with working("recording"):
                loaded = load_model(model, draft, None, cache)
                costs = profile(loaded, batch=batch, draft_length=loaded.spec.gamma)
                texts = [text for group in held_out(prompts).values() for text in group]
                results = [
                    generate(
                        loaded,
                        texts[first : first + batch],
                        max_new_tokens=max_new_tokens,
                        draft_length=loaded.spec.gamma,
                        trace=True,
                    )
                    for first in range(0, len(texts) - batch + 1, batch)
                ]
            config = loaded.spec.draft
            parts = [record(group, costs, config) for group in results]
            save_recording(log, joined(parts))
        recording = load_recording(log)
        if raw:
            recording = dataclasses.replace(recording, temperatures=None, shifts=None)
        scores = {
            _title(one): replay(recording, one)
            for name in names
            for one in _policies(name, recording.confidence.shape[2])
        }
    if as_json:
        typer.echo(json.dumps({name: one.to_json() for name, one in scores.items()}))
        return
    Console().print(_table(scores))


def _policies(name: str, drafts: int) -> list[Policy]:
    if name == "fixed":
        return [Fixed(n) for n in range(drafts + 1)]
    return [KINDS[name](drafts)]


def _title(policy: Policy) -> str:
    if isinstance(policy, Fixed):
        return f"fixed {policy.draft_length}"
    return type(policy).__name__


def _table(scores: dict[str, Score]) -> Table:
    table = Table("policy", "tok/s", "verified", "accepted length", "drafting")
    for name, one in scores.items():
        table.add_row(
            name,
            f"{one.tokens_per_second:.1f}",
            f"{one.verified:.2f}",
            f"{one.accepted_length:.2f}",
            f"{one.drafting:.0%}",
        )
    return table
