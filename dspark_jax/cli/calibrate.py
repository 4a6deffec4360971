"""`calibrate`: temperatures and shifts for a draft's confidences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dspark_jax.calibrate import Calibration, split
from dspark_jax.calibrate import calibrate as run_calibration
from dspark_jax.checkpoint.calibrated import read_draft_config
from dspark_jax.cli.common import (
    CacheOption,
    CompileCacheOption,
    DraftOption,
    DtypeOption,
    ModelOption,
    load_model,
    one_line_errors,
    use_compile_cache,
    working,
)
from dspark_jax.config import require
from dspark_jax.files import replace_text
from dspark_jax.plotting import figure_class
from dspark_jax.prompt_files import read_prompts
from dspark_jax.scheduling.diagrams import draw_reliability
from dspark_jax.scheduling.survival import survival

ALL = "overall"


def calibrate(
    prompts: Annotated[
        Path,
        typer.Option(help="A file of JSON lines; not those the draft was trained on."),
    ],
    model: ModelOption = "smollm2-135m",
    draft: DraftOption = "auto",
    temperature: Annotated[
        float, typer.Option(help="Of sampling; a fit is for one. 0 is greedy.")
    ] = 0.0,
    limit: Annotated[
        int | None, typer.Option(help="Use the first so many prompts.")
    ] = None,
    holdout: Annotated[
        float, typer.Option(help="Share of the prompts to measure on, not to fit.")
    ] = 0.25,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    shift: Annotated[
        bool,
        typer.Option(help="Fit shifts too, where that helps on prompts not fitted."),
    ] = True,
    bins: Annotated[int, typer.Option(help="Of the calibration error.")] = 15,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 8,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    chat: Annotated[bool, typer.Option(help="Render prompts as chats.")] = True,
    dtype: DtypeOption = None,
    cache: CacheOption = None,
    compile_cache: CompileCacheOption = None,
    write: Annotated[
        bool, typer.Option("--write", help="Store what was fitted with the draft.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw reliability diagrams into this folder."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the JSON to this file as well.")
    ] = None,
) -> None:
    """Fit temperatures and shifts that make the draft's confidences right."""
    with one_line_errors():
        # Everything that can be wrong comes before the decoding, which takes long.
        require(limit is None or limit >= 2, "limit", limit, "None or an int >= 2")
        texts = [one.prompt for one in read_prompts(prompts)][:limit]
        split(texts, holdout)
        if plot is not None:
            figure_class()
        if write:
            _check_writable(draft)
        use_compile_cache(compile_cache)
        loaded = load_model(model, draft, dtype, cache)
        with working("decoding"):
            found = run_calibration(
                loaded,
                texts,
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                holdout=holdout,
                seed=seed,
                chat=chat,
                shift=shift,
                bins=bins,
                batch=batch,
            )
        if write:
            found.save(draft)
    report = {
        "model": loaded.name,
        "dtype": loaded.spec.target.dtype,
        "prompt_source": prompts.name,
        "max_new_tokens": max_new_tokens,
        **found.to_json(),
        "written": write,
    }
    if plot is not None:
        report["diagrams"] = [str(file) for file in draw(found, plot)]
    if output is not None:
        replace_text(output, json.dumps(report, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(report))
    else:
        show(report, Console())


def draw(found: Calibration, folder: Path) -> list[Path]:
    """Writes the diagrams before and after; their files."""
    folder.mkdir(parents=True, exist_ok=True)
    rounds, files = found.rounds, []
    fitted = (found.temperatures, found.shifts)
    for name, scaling in (("before", (None, None)), ("after", fitted)):
        file = folder / f"reliability_{name}.svg"
        draw_reliability(
            file,
            survival(rounds.logits, *scaling),
            rounds.outcomes,
            found.bins,
            proposed=rounds.proposed,
            title=f"{name} calibration, sampling temperature "
            f"{found.calibrated_at:g}, {len(rounds)} rounds",
        )
        files.append(file)
    return files


def _check_writable(draft: str) -> None:
    if draft in ("auto", "none"):
        raise ValueError(
            f"`--write` changes the draft's config, so it has to be named: `--draft "
            f"PATH` instead of {draft}"
        )
    read_draft_config(draft)


def show(report: dict[str, Any], console: Console) -> None:
    """Prints a report as a table."""
    counts = report["counts"]
    console.print(
        f"{report['model']}, {report['dtype']}, sampling temperature "
        f"{report['calibrated_at']:g}: fitted on {counts['fit_rounds']} rounds of "
        f"{counts['fit_prompts']} prompts, measured on {counts['evaluation_rounds']} "
        f"rounds of {counts['evaluation_prompts']} others",
        highlight=False,
        soft_wrap=True,
    )
    shifts = report["shifts"]
    table = Table("draft", "rounds", "stood", "T", *(["shift"] if shifts else []))
    for title in ("predicted", "ECE", "noise", "Brier", "AUC"):
        table.add_column(title)
    for k, temperature in enumerate(report["temperatures"]):
        parts = [
            {name: column[k] for name, column in report[part].items() if name != ALL}
            for part in ("before", "after")
        ]
        table.add_row(
            str(k + 1),
            str(parts[0]["count"]),
            _number(parts[0]["label"]),
            f"1\n{temperature:.3g}",
            *([f"0\n{shifts[k]:+.1f}"] if shifts else []),
            *_cells(*parts),
        )
    overall = report["before"][ALL], report["after"][ALL]
    blank = ["", ""] if shifts else [""]
    table.add_row("all", "", _number(overall[0]["label"]), *blank, *_cells(*overall))
    console.print(table)
    console.print(
        "first lines before, second lines after; noise: the ECE that right predictions "
        "would show by chance",
        soft_wrap=True,
    )
    if report["choice"] is not None:
        console.print(_reasons(report["choice"]), highlight=False, soft_wrap=True)
    for note in report["notes"]:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    if report["written"]:
        console.print("the temperatures are stored with the draft")


def _reasons(choice: dict[str, Any]) -> str:
    errors = ", ".join(f"{kind} {x:.3f}" for kind, x in choice["errors"].items())
    return f"chosen: {choice['kind']}; ECE on half of the fitted prompts: {errors}"


def _cells(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = ("prediction", "ece", "noise", "brier", "auc")
    return [f"{_number(before[name])}\n{_number(after[name])}" for name in names]


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}"
