"""`train`: a draft for a target, from text that the target wrote."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dspark_jax.cli.common import (
    CacheOption,
    CompileCacheOption,
    ModelOption,
    one_line_errors,
    use_compile_cache,
    working,
)
from dspark_jax.training.train import (
    curves,
    export_run,
    make_trainer,
    settings_for,
)
from dspark_jax.training.trainer import Trainer

logger = logging.getLogger(__name__)


def train(
    data: Annotated[
        list[Path], typer.Option(help="Text from `data`; may be given again.")
    ],
    run: Annotated[Path, typer.Option(help="Folder of the run, to go on with.")],
    out: Annotated[
        Path | None, typer.Option(help="Write the draft here when done.")
    ] = None,
    model: ModelOption = "smollm2-135m",
    recipe: Annotated[
        Path | None, typer.Option(help="Settings, a TOML file; default: the paper's.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop and save after so long.")
    ] = None,
    held_out: Annotated[int, typer.Option(help="Sequences only measured on.")] = 64,
    base: Annotated[
        str | None, typer.Option(help="Go on from this draft, not from new weights.")
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(help="Folder of target features, which runs may share."),
    ] = None,
    features_gb: Annotated[
        float | None, typer.Option(help="Its size at most; 0: nothing is kept.")
    ] = None,
    annotate: Annotated[
        bool, typer.Option("--annotate", help="Only fill the features' cache.")
    ] = False,
    export: Annotated[
        bool, typer.Option("--export", help="Write the draft before it is done, too.")
    ] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="Store the draft in 8-bit integers.")
    ] = False,
    usual_length: Annotated[
        int | None,
        typer.Option(help="Drafts a round where nothing else is asked for."),
    ] = None,
    data_parallel: Annotated[
        int, typer.Option(help="Devices a batch is split over.")
    ] = 1,
    tensor_parallel: Annotated[
        int, typer.Option(help="Devices weights are split over.")
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Write learning curves to this .png file.")
    ] = None,
    cache: CacheOption = None,
    compile_cache: CompileCacheOption = None,
) -> None:
    """Train a draft, or go on with a run."""
    with one_line_errors():
        config = settings_for(recipe, steps)
        use_compile_cache(compile_cache)
        with working(f"loading {model}"):
            trainer = make_trainer(
                model,
                data,
                run,
                config,
                held_out=held_out,
                base=base,
                features=features,
                cache_bytes=None if features_gb is None else int(features_gb * 2**30),
                devices=(data_parallel, tensor_parallel),
                cache_dir=cache,
            )
        if annotate:
            _annotate(trainer)
            return
        complete = _train(trainer, minutes)
        typer.echo(f"{trainer.step} of {config.steps} steps done")
        if out is not None and (complete or export):
            line = trainer.measure()
            export_run(
                trainer,
                out,
                line["held_out"],
                model,
                int8=int8,
                usual_length=usual_length,
            )
            typer.echo(f"draft written to {out}")
        if plot is not None:
            curves(run, plot)
            typer.echo(f"curves written to {plot}")


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[shown]}"),
        console=console,
        disable=not console.is_terminal,
    )


def _annotate(trainer: Trainer) -> None:
    with _progress() as progress:
        wanted = trainer.corpus.everything
        bar = progress.add_task("target passes", total=len(wanted), shown="")
        for count in trainer.corpus.annotate(wanted):
            progress.advance(bar, count)


def _train(trainer: Trainer, minutes: float | None) -> bool:
    with _progress() as progress:
        bar = progress.add_task(
            "steps", total=trainer.config.steps, completed=trainer.step, shown=""
        )

        def report(line: dict[str, Any]) -> None:
            text = _shown(line)
            progress.update(bar, completed=line["step"], shown=text)
            if progress.disable or "held_out" in line:
                logger.info("step %d %s", line["step"], text)

        return trainer.train(minutes=minutes, report=report)


def _shown(line: dict[str, Any]) -> str:
    values = line.get("held_out", line)
    names = ("loss", "accept", "seconds_a_step", "greedy_length", "expected_length")
    return " ".join(
        f"{name.replace('_', ' ')} {values[name]:.3f}"
        for name in names
        if values.get(name) is not None
    )
