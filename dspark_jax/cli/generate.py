"""`generate PROMPT`: text as it is made, or one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from dspark_jax.cli.common import (
    CacheOption,
    CompileCacheOption,
    DraftLengthOption,
    DraftOption,
    DtypeOption,
    ImplementationOption,
    ModelOption,
    WeightsOption,
    load_model,
    one_line_errors,
    use_compile_cache,
)
from dspark_jax.cli.policy import PolicyOption, policy_of
from dspark_jax.decoding.requests import check_verification
from dspark_jax.generate import stream
from dspark_jax.results import Result
from dspark_jax.settings import SamplingParams


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    model: ModelOption = "smollm2-135m",
    draft: DraftOption = "auto",
    draft_length: DraftLengthOption = None,
    policy: PolicyOption = "fixed",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Default: off.")] = None,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Makes sampling reproducible.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="At most this many.")] = 256,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End before this text; may be given several times."),
    ] = None,
    verification: Annotated[
        str, typer.Option(help="exact, or shared_noise: one text a seed.")
    ] = "exact",
    chat: Annotated[
        bool, typer.Option(help="Use the chat template, or continue plain text.")
    ] = True,
    dtype: DtypeOption = None,
    weights: WeightsOption = "float",
    implementation: ImplementationOption = None,
    cache: CacheOption = None,
    compile_cache: CompileCacheOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Generate text."""
    with one_line_errors():
        # What can be wrong without a model is found before one is read.
        sampling = SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
        )
        check_verification(verification)
        use_compile_cache(compile_cache)
        loaded = load_model(model, draft, dtype, cache, implementation, weights)
        chosen, costs = policy_of(policy, loaded, draft_length, sampling)
        result = None
        for piece in stream(
            loaded,
            prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            policy=chosen,
            costs=costs,
            verification=verification,
            stop=stop or (),
            chat=chat,
        ):
            if not as_json:
                typer.echo(piece.text, nl=False)
                sys.stdout.flush()
            result = piece.result or result
    assert result is not None  # The last piece carries it.
    if as_json:
        typer.echo(json.dumps(result.to_json()))
        return
    typer.echo()
    if sys.stderr.isatty():
        typer.secho(_footer(result), dim=True, err=True)


def _footer(result: Result) -> str:
    stats = result.stats
    words = [f"{stats.generated} tokens", f"{stats.tokens_per_second:.1f} tokens/s"]
    if stats.drafted:
        words.append(f"{stats.accepted_length:.2f} a round")
    return f"[{', '.join(words)}, ended by {result.finish_reason}]"
