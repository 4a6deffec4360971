"""`data`: text to train a draft on, written by its target."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from dspark_jax.cli.common import (
    CacheOption,
    CompileCacheOption,
    DtypeOption,
    ModelOption,
    load_model,
    one_line_errors,
    use_compile_cache,
)
from dspark_jax.prompt_files import BUILTIN, PromptRecord, read_prompts
from dspark_jax.training.data_plan import DataConfig, parse_temperatures
from dspark_jax.training.generate_data import DataReport, generate_data
from dspark_jax.training.prompts import builtin_prompts

BUILTIN_COUNT = 10_000


def data(
    out: Annotated[Path, typer.Option(help="The folder to write; goes on with one.")],
    sequences: Annotated[int, typer.Option(help="How many.")],
    model: ModelOption = "smollm2-135m",
    prompts: Annotated[
        str, typer.Option(help="builtin or a file of JSON lines.")
    ] = BUILTIN,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 64,
    temperatures: Annotated[
        str, typer.Option(help="temperature:weight pairs; sequences take turns.")
    ] = "0:3,0.7:1,1:2",
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    invent: Annotated[
        float,
        typer.Option(help="Share of sequences whose question the model invents."),
    ] = 0.0,
    answers: Annotated[
        int | None,
        typer.Option(
            help="Most answers of a sequence; default: 1, with --invent until it is "
            "full."
        ),
    ] = None,
    shard: Annotated[int, typer.Option(help="Sequences a file.")] = 256,
    chat: Annotated[
        bool, typer.Option(help="Use the chat template, or continue plain text.")
    ] = True,
    dtype: DtypeOption = None,
    cache: CacheOption = None,
    compile_cache: CompileCacheOption = None,
) -> None:
    """Let a target write the text that its draft is trained on."""
    with one_line_errors():
        config = DataConfig(
            sequences=sequences,
            length=length,
            batch=batch,
            temperatures=parse_temperatures(temperatures),
            seed=seed,
            invent=invent,
            answers=answers,
            shard=shard,
            chat=chat,
        )
        given = _prompts(prompts)
        use_compile_cache(compile_cache)
        loaded = load_model(model, "none", dtype, cache)
        with _progress(Console(stderr=True)) as report:
            done = generate_data(
                loaded, [one.prompt for one in given], out, config, progress=report
            )
    typer.echo(_closing(out, done, given))


def _prompts(source: str) -> list[PromptRecord]:
    if source == BUILTIN:
        return builtin_prompts(BUILTIN_COUNT)
    return read_prompts(source, builtin=True)


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal; elsewhere a line on stderr for every shard."""
    if not console.is_terminal:
        with _log_lines():
            yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("compiling", total=None, speed="")
        began: list[float] = []

        def report(done: int, total: int) -> None:
            # Compiling is over when the first round is: time counts from there.
            began[:] = began or [time.perf_counter(), done]
            seconds = time.perf_counter() - began[0]
            speed = f"{(done - began[1]) / seconds:.0f} positions/s" if seconds else ""
            bars.update(
                task, description="writing", completed=done, total=total, speed=speed
            )

        yield report


@contextlib.contextmanager
def _log_lines() -> Iterator[None]:
    """Shows what the library logs about the text while it is written."""
    logger = logging.getLogger("dspark_jax.training")
    handler = _Lines()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # A handler of the root would say everything twice.
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


class _Lines(logging.Handler):
    """One line on stderr for each record."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the message."""
        typer.echo(record.getMessage(), err=True)


def _closing(out: Path, done: DataReport, given: list[PromptRecord]) -> str:
    lines = [
        f"{out}: {done.sequences:,} sequences; {done.answer:,} answer tokens, "
        f"{done.question:,} of questions by the model, {done.forced:,} given, "
        f"{done.padding_share:.1%} padding"
    ]
    domains = Counter(one.domain or "no domain" for one in given)
    known = ", ".join(f"{name} {count}" for name, count in domains.items())
    left = f", {done.left_out} too long" if done.left_out else ""
    lines.append(f"{len(given):,} prompts ({known}){left}")
    if done.tokens_per_second is None:
        lines.append("nothing was left to write")
    else:
        lines.append(
            f"{done.new:,} tokens written in {done.seconds:.1f} s, "
            f"{done.tokens_per_second:.0f} tokens/s, and {done.compile_seconds:.1f} s "
            "compiling"
        )
    return "\n".join(lines)
