"""`eval`: how much of a draft's proposals stands, as the paper measures it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dspark_jax.cli.common import (
    CacheOption,
    CompileCacheOption,
    DraftLengthOption,
    DraftOption,
    DtypeOption,
    ModelOption,
    load_model,
    one_line_errors,
    use_compile_cache,
)
from dspark_jax.config import require
from dspark_jax.evaluation.evaluate import evaluate
from dspark_jax.evaluation.evaluate_plots import save_plots
from dspark_jax.evaluation.gather import gather
from dspark_jax.evaluation.machine import hardware, versions
from dspark_jax.files import replace_text
from dspark_jax.plotting import figure_class
from dspark_jax.prompt_files import BUILTIN
from dspark_jax.settings import SamplingParams


def evaluate_draft(
    model: ModelOption = "smollm2-135m",
    draft: DraftOption = "auto",
    prompts: Annotated[
        list[str] | None,
        typer.Option(help="builtin or a file of JSON lines; may be repeated."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each domain at most.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 256,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="0 is greedy; may be repeated. Default: 0 and 1."),
    ] = None,
    draft_length: DraftLengthOption = None,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the first prompt.")] = 0,
    no_chat: Annotated[
        bool, typer.Option("--no-chat", help="Continue plain text.")
    ] = False,
    speed: Annotated[
        bool, typer.Option("--speed", help="Also time plain against drafts.")
    ] = False,
    dtype: DtypeOption = None,
    cache: CacheOption = None,
    compile_cache: CompileCacheOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the JSON to this file as well.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw PNG files into this folder.")
    ] = None,
) -> None:
    """Measure how many drafts stand: by domain, position and threshold."""
    sources = prompts or [BUILTIN]
    with one_line_errors():
        if plot is not None:
            # Asked before the work is done.
            figure_class()
        heat = temperature or [0.0, 1.0]
        for one in heat:
            SamplingParams(temperature=one)
        require(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "an int >= 1")
        texts = gather(sources, limit)
        use_compile_cache(compile_cache)
        loaded = load_model(model, draft, dtype, cache)
        machine = hardware()
        with _progress() as progress:
            found = evaluate(
                loaded,
                texts,
                temperatures=heat,
                max_new_tokens=max_new_tokens,
                draft_length=draft_length,
                batch=batch,
                chat=not no_chat,
                seed=seed,
                speed=speed,
                progress=progress,
            )
        report = {
            **found.to_json(),
            "prompts": [source if source == BUILTIN else Path(source).name
                        for source in sources],
            "batch": batch,
            "seed": seed,
            "chat": not no_chat,
            "hardware": machine,
            "versions": versions(),
        }  # fmt: skip
        if output is not None:
            replace_text(output, json.dumps(report, indent=2) + "\n")
        if plot is not None:
            save_plots(report, plot)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        show(report, Console())


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says on a terminal what is being done; nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("decoding") as status:
        yield status.update


def show(report: Mapping[str, Any], console: Console) -> None:
    """Prints a report as tables."""
    console.print(
        f"{report['model']}, {report['dtype']}, {report['draft_length']} drafts a "
        f"round, {report['max_new_tokens']} new tokens, "
        f"prompts: {', '.join(report['prompts'])}",
        highlight=False,
        soft_wrap=True,
    )
    for one in report["temperatures"]:
        console.print(f"\ntemperature {one['temperature']:g}", highlight=False)
        console.print(_domains(one))
        console.print(_positions(one["overall"]))
        if one["overall"]["sweep"]:
            console.print(_sweep(one["overall"]["sweep"]))
        if one["speed_ratio"] is not None:
            ratio = f"speed, drafts / plain: {one['speed_ratio']:.2f}"
            console.print(ratio, highlight=False)


def _domains(one: Mapping[str, Any]) -> Table:
    table = Table("domain", "prompts", "rounds", "accepted\nlength", "verify\nrate, %")
    overlaps = bool(one["overall"]["overlap"])
    if overlaps:
        table.add_column("by\noverlap")
    for name, row in (*one["domains"].items(), ("overall", one["overall"])):
        cells = [
            name,
            str(row["prompts"]),
            str(row["rounds"]),
            _number(row["accepted_length"], 2),
            _percent(row["verify_rate"]),
        ]
        if overlaps:
            cells.append(_number(row["expected_length"], 2))
        table.add_row(*cells)
    return table


def _positions(figures: Mapping[str, Any]) -> Table:
    count = len(figures["proposed"])
    table = Table("position, %", *[str(k) for k in range(1, count + 1)])
    for title, name in (
        ("accepted once reached", "conditional"),
        ("mean overlap", "overlap"),
        ("prefix accepted", "survival"),
        ("predicted", "predicted"),
    ):
        if figures[name]:
            table.add_row(title, *[_percent(share) for share in figures[name]])
    quality = figures["quality"]
    if quality is not None:
        for title, name in (("calibration error", "ece"), ("AUC", "auc")):
            table.add_row(title, *[_percent(value) for value in quality[name]])
    return table


def _sweep(points: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("threshold", "drafts", "rows", "accepted\nlength", "verify\nrate, %")
    for point in points:
        table.add_row(
            f"{point['threshold']:g}",
            _number(point["drafts"], 2),
            _number(point["verified_rows"], 2),
            _number(point["accepted_length"], 2),
            _percent(point["verify_rate"]),
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"
