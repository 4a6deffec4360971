"""`plan CONFIG`: what a model takes on each device, and whether it fits."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from dspark_jax.cli.common import one_line_errors
from dspark_jax.planning import make_plan, read_settings


def plan(
    config: Annotated[str, typer.Argument(help="A config.json, or its folder.")],
    devices: Annotated[int, typer.Option("--devices", help="To split over.")] = 1,
    memory: Annotated[float, typer.Option("--memory", help="GB of a device.")] = 80.0,
    requests: Annotated[int, typer.Option("--requests", help="Together.")] = 1,
    context: Annotated[int, typer.Option("--context", help="Positions each.")] = 65536,
    expand: Annotated[
        str | None, typer.Option("--expand", help="Short floats as this dtype.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print bytes of parameters and states per device. No weights are read."""
    with one_line_errors():
        target, draft = read_settings(config, expand)
        found = make_plan(
            target,
            draft,
            devices=devices,
            memory=int(memory * 1e9),
            requests=requests,
            context=context,
        )
    if as_json:
        facts = {
            "parameters": dict(found.parameters),
            "states": dict(found.states),
            "total": found.total,
            "memory": found.memory,
            "fits": found.fits,
        }
        typer.echo(json.dumps(facts, indent=2))
        return
    table = Table(f"per device, {devices} in all", "bytes", "")
    for part, size in found.parameters.items():
        table.add_row(f"parameters of the {part}", f"{size:,}", decimal(size))
    for part, size in found.states.items():
        table.add_row(
            f"state of the {part}, {context:,} positions", f"{size:,}", decimal(size)
        )
    table.add_row(f"all, {requests} requests", f"{found.total:,}", decimal(found.total))
    console = Console()
    console.print(table)
    verdict = "fits" if found.fits else "does not fit"
    console.print(
        f"{verdict} into {memory:g} GB a device, a tenth of it kept for activations"
    )
