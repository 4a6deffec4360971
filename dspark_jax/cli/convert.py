"""`convert SRC DST`: a published checkpoint as a directory that loads fast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from dspark_jax.checkpoint import convert as conversion
from dspark_jax.checkpoint.known import resolve
from dspark_jax.cli.common import one_line_errors


def convert(
    src: Annotated[
        str, typer.Argument(help="A published folder, a .gguf file, or org/name.")
    ],
    dst: Annotated[Path, typer.Argument(help="The directory to make.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16; default: as stored."),
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Read everything back and compare checksums.")
    ] = True,
) -> None:
    """Convert a published checkpoint to a directory that loads fast and sharded."""
    with one_line_errors(), _progress(Console(stderr=True)) as report:
        made = conversion.convert(
            resolve(src), dst, dtype=dtype, verify=verify, progress=report
        )
    checked = ", verified" if made.verified else ""
    typer.echo(
        f"{made.path}: {made.kind}, {made.parameters:,} parameters, "
        f"{decimal(made.nbytes)}{checked}"
    )


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[conversion.Progress | None]:
    """A bar for each step on a terminal, nothing elsewhere."""
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def report(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done)

        yield report


def main() -> None:
    """The command on its own, for the script."""
    typer.run(convert)
