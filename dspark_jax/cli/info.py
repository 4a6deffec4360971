"""`info PATH`: what a checkpoint is, without reading its weights."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from dspark_jax.checkpoint.describe import describe
from dspark_jax.checkpoint.known import resolve
from dspark_jax.cli.common import one_line_errors


def info(
    path: Annotated[
        str,
        typer.Argument(help="A folder, a .gguf file, a converted directory or a name."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a checkpoint: format, kind, settings, sizes, where it came from."""
    with one_line_errors():
        facts = describe(resolve(path))
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console()
    console.print(_overview(facts))
    console.print(_families(facts))


def _overview(facts: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None)
    table.add_row("format", facts["format"])
    table.add_row("kind", facts["kind"])
    table.add_row("parameters", f"{facts['parameters']:,}")
    table.add_row("size", decimal(facts["bytes"]))
    for name, value in facts["config"].items():
        table.add_row(name, _short(value))
    for name, value in facts["origin"].items():
        table.add_row(f"origin {name}", _short(value))
    if "library" in facts:
        table.add_row("converted by", f"dspark-jax {facts['library']}")
    return table


def _families(facts: dict[str, Any]) -> Table:
    table = Table("parameter", "shape", "dtype", "size")
    for family in facts["families"]:
        shape = " x ".join(str(n) for n in family["shape"])
        table.add_row(family["name"], shape, family["dtype"], decimal(family["bytes"]))
    return table


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    return str(value)
