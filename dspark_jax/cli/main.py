"""The `dspark-jax` command."""

from __future__ import annotations

from typing import Annotated

import typer

from dspark_jax import __version__
from dspark_jax.cli.bench import bench
from dspark_jax.cli.calibrate import calibrate
from dspark_jax.cli.convert import convert
from dspark_jax.cli.data import data
from dspark_jax.cli.demo import demo
from dspark_jax.cli.eval import evaluate_draft
from dspark_jax.cli.generate import generate
from dspark_jax.cli.info import info
from dspark_jax.cli.init_tiny_v4 import init_tiny_v4
from dspark_jax.cli.plan import plan
from dspark_jax.cli.replay import replay_command
from dspark_jax.cli.train import train

app = typer.Typer(
    help="Lossless speculative decoding with DSpark drafts, in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, bench, demo, info, convert, data, train, calibrate):
    app.command()(command)
app.command("eval")(evaluate_draft)
app.command("replay")(replay_command)
app.command("init-tiny-v4")(init_tiny_v4)
app.command("plan")(plan)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="And exit."
        ),
    ] = False,
) -> None:
    """Lossless speculative decoding with DSpark drafts, in JAX."""
