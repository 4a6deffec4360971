"""`demo`: text of one prompt per domain, with and without drafts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dspark_jax.cli.common import (
    CacheOption,
    CompileCacheOption,
    DraftLengthOption,
    DraftOption,
    ModelOption,
    load_model,
    one_line_errors,
    use_compile_cache,
    working,
)
from dspark_jax.evaluation.compare import Pair, Settings, compare, summarise, warm_up
from dspark_jax.evaluation.prompts import held_out
from dspark_jax.results import Piece


def demo(
    model: ModelOption = "smollm2-135m",
    draft: DraftOption = "auto",
    draft_length: DraftLengthOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 60,
    cache: CacheOption = None,
    compile_cache: CompileCacheOption = None,
) -> None:
    """Show text from a small model, with and without a draft."""
    console = Console()
    with one_line_errors():
        use_compile_cache(compile_cache)
        loaded = load_model(model, draft, None, cache)
        n = loaded.spec.check_draft_length(draft_length)
        settings = Settings(n, max_new_tokens)
        prompts = held_out(1)
        console.print(_opening(loaded.name, n), highlight=False)
        with working("compiling"):
            warm_up(loaded, [texts[0] for texts in prompts.values()], settings)
        pairs = []
        for pair in compare(loaded, prompts, settings, listener=_announce):
            typer.echo("\n")
            pairs.append(pair)
    console.print(_table(pairs))
    console.print(_closing(pairs, n), highlight=False)
    if not all(pair.identical for pair in pairs):
        raise typer.Exit(1)


def _opening(name: str, n: int) -> str:
    if n == 0:
        return f"{name}, no draft: plain decoding only.\n"
    return f"{name}, greedy, {n} drafts a round. Compiling takes a moment.\n"


def _announce(domain: str, prompt: str):
    typer.secho(f"[{domain}] {prompt}", bold=True)

    def show(piece: Piece) -> None:
        typer.echo(piece.text, nl=False)
        sys.stdout.flush()

    return show


def _table(pairs: Sequence[Pair]) -> Table:
    table = Table("prompt", "tokens", "accepted length", "tok/s", "plain tok/s")
    for pair in pairs:
        drafted = pair.speculative.stats if pair.speculative else None
        table.add_row(
            pair.domain,
            str(pair.plain.stats.generated),
            f"{drafted.accepted_length:.2f}" if drafted else "-",
            f"{drafted.tokens_per_second:.1f}" if drafted else "-",
            f"{pair.plain.stats.tokens_per_second:.1f}",
        )
    return table


def _closing(pairs: Sequence[Pair], n: int) -> str:
    total = summarise(pairs)
    if n == 0 or total.ratio is None:
        return (
            f"Plain decoding: {total.plain:.1f} tokens/s. Nothing was drafted, so "
            "there is nothing to compare; --draft names a draft."
        )
    speed = (
        f"{total.speculative:.1f} tokens/s with drafts, {total.plain:.1f} without: "
        f"{total.ratio:.2f} times as fast, {total.accepted_length or 0:.2f} tokens a "
        "round."
    )
    if total.identical == total.prompts:
        return f"{speed}\nTokens were identical to plain decoding, every one."
    return (
        f"{speed}\nTokens DIFFERED from plain decoding on "
        f"{total.prompts - total.identical} of {total.prompts} prompts."
    )
