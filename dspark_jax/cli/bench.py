"""`bench`: plain against speculative decoding, and where the time goes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
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
    WeightsOption,
    load_model,
    one_line_errors,
    use_compile_cache,
    working,
)
from dspark_jax.cli.policy import PolicyOption, policy_of
from dspark_jax.evaluation.compare import Pair, Settings, compare, summarise, warm_up
from dspark_jax.evaluation.machine import hardware, versions
from dspark_jax.evaluation.prompts import held_out, random_prompts
from dspark_jax.evaluation.timing import TimedPrograms, plain_step_bytes, round_times
from dspark_jax.files import replace_text
from dspark_jax.model import Model
from dspark_jax.settings import SamplingParams

HELD_OUT = "held-out set"
RANDOM = "random tokens"
NOT_REPRESENTATIVE = "acceptance not representative"


def bench(
    model: ModelOption = "smollm2-135m",
    draft: DraftOption = "auto",
    draft_length: DraftLengthOption = None,
    policy: PolicyOption = "fixed",
    prompts: Annotated[int, typer.Option(help="Prompts per domain.")] = 4,
    random: Annotated[
        bool,
        typer.Option(
            "--random-prompts", help="Random tokens: times only, no acceptance."
        ),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    dtype: DtypeOption = None,
    weights: WeightsOption = "float",
    cache: CacheOption = None,
    compile_cache: CompileCacheOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the JSON to this file as well.")
    ] = None,
) -> None:
    """Time plain and speculative decoding of the same prompts, taking turns."""
    with one_line_errors():
        sampling = SamplingParams(temperature=temperature)
        texts = {} if random else held_out(prompts)
        use_compile_cache(compile_cache)
        loaded = load_model(model, draft, dtype, cache, weights=weights)
        timed = TimedPrograms(loaded.programs)
        loaded = dataclasses.replace(loaded, programs=timed)
        if random:
            if loaded.tokenizer is None:
                raise ValueError(f"{model} has no tokenizer; `bench` needs one")
            texts = {"random": random_prompts(loaded.tokenizer, prompts)}
        n = loaded.spec.check_draft_length(draft_length)
        with working("timing rounds"):
            chosen, costs = policy_of(policy, loaded, n, sampling)
        settings = Settings(n, max_new_tokens, temperature, not random, chosen, costs)
        before = hardware()
        with working("compiling"):
            warm_up(loaded, [t for group in texts.values() for t in group], settings)
        timed.clear()
        with working("decoding"):
            pairs = list(compare(loaded, texts, settings))
        with working("timing rounds"):
            report = _report(loaded, settings, pairs, random, before)
    if output is not None:
        replace_text(output, json.dumps(report, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(report))
    else:
        show(report, Console())


def _report(
    model: Model,
    settings: Settings,
    pairs: Sequence[Pair],
    random: bool,
    machine: dict[str, Any],
) -> dict[str, Any]:
    def figures(chosen: Sequence[Pair]) -> dict[str, Any]:
        return summarise(chosen).to_json(
            representative=not random, greedy=settings.temperature == 0
        )

    domains = list(dict.fromkeys(pair.domain for pair in pairs))
    report: dict[str, Any] = {
        "model": model.name,
        "dtype": model.spec.target.dtype,
        "draft_length": settings.draft_length,
        "policy": repr(settings.policy),
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "prompt_source": RANDOM if random else HELD_OUT,
        "hardware": machine,
        "versions": versions(),
        "domains": {d: figures([p for p in pairs if p.domain == d]) for d in domains},
        "overall": figures(pairs),
        "time": _time(model),
        "compile_seconds": model.programs.seconds,
        "programs": model.programs.count,
    }
    if random:
        report["note"] = NOT_REPRESENTATIVE
    return report


def _time(model: Model) -> dict[str, Any]:
    """Rounds by program, and the plain step beside the memory's speed."""
    programs, bandwidth = round_times(model)
    weights = plain_step_bytes(model)
    bound_ms = 1000 * weights / bandwidth
    plain = [one["device_ms"] for one in programs if one["draft_length"] == 0]
    return {
        "programs": programs,
        "read_bandwidth": bandwidth,
        "plain_step_bytes": weights,
        "bound_ms": bound_ms,
        # 1: the step takes as long as reading the weights once.
        "share_of_bound": bound_ms / min(plain) if plain else None,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Prints a report as tables."""
    machine, found = report["hardware"], report["versions"]
    console.print(
        f"{machine['device']}, {machine['cores']} cores, {machine['platform']}"
        f" (load {machine.get('load_average', '?')})",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        ", ".join(f"{k} {v}" for k, v in found.items())
        + f"\n{report['model']}, {report['dtype']}, "
        f"draft length {report['draft_length']}, {report['policy']}, temperature "
        f"{report['temperature']}, {report['max_new_tokens']} new tokens, prompts: "
        f"{report['prompt_source']}",
        highlight=False,
        soft_wrap=True,
    )
    if report["draft_length"] == 0:
        console.print("no draft: plain decoding only")
    if "note" in report:
        console.print(f"{report['prompt_source']}: {report['note']}")
    console.print(_figures(report))
    console.print(_rounds(report["time"]))
    time = report["time"]
    if time["share_of_bound"] is not None:
        console.print(
            f"memory read {time['read_bandwidth'] / 1e9:.1f} GB/s; a plain step reads "
            f"{time['plain_step_bytes'] / 1e6:.0f} MB of weights, "
            f"{time['bound_ms']:.1f} ms at that rate: the step runs at "
            f"{time['share_of_bound']:.0%} of the bound",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"{report['programs']} programs, {report['compile_seconds']:.1f} s compiling",
        highlight=False,
        soft_wrap=True,
    )


def _figures(report: dict[str, Any]) -> Table:
    accepted = "accepted_length" in report["overall"]
    identical = "identical" in report["overall"] and report["draft_length"] > 0
    table = Table("domain", "plain\ntok/s", "drafts\ntok/s", "ratio")
    for title, wanted in (
        ("accepted\nlength", accepted),
        ("accepted by\nposition, %", accepted),
        ("same\ntokens", identical),
    ):
        if wanted:
            table.add_column(title)
    for name, row in (*report["domains"].items(), ("overall", report["overall"])):
        cells = [
            name,
            _number(row["plain_tokens_per_second"], 1),
            _number(row["speculative_tokens_per_second"], 1),
            _number(row["ratio"], 2),
        ]
        if accepted:
            cells.append(_number(row["accepted_length"], 2))
            cells.append(" ".join(f"{share:.0%}"[:-1] for share in row["acceptance"]))
        if identical:
            cells.append(f"{row['identical']} of {row['prompts']}")
        table.add_row(*cells)
    return table


def _rounds(time: dict[str, Any]) -> Table:
    titles = ("round", "capacity", "rounds", "ms", "best", "device", "step")
    table = Table(*titles, "gap", "host")
    for one in time["programs"]:
        n = one["draft_length"]
        table.add_row(
            f"{n} drafts" if n else "plain",
            str(one["capacity"]),
            str(one["rounds"]),
            _number(one["round_ms"], 2),
            *(
                _number(one[name], 2)
                for name in (
                    "round_ms_best",
                    "device_ms",
                    "step_ms",
                    "gap_ms",
                    "host_ms",
                )
            ),
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
