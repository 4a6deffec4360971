"""`init-tiny-v4 DIR`: a small random checkpoint in DeepSeek-V4's published layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

from dspark_jax.checkpoint.safetensors_source import SINGLE
from dspark_jax.cli.common import one_line_errors
from dspark_jax.testing.tiny_v4 import write_tiny_v4


def init_tiny_v4(
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    seed: Annotated[int, typer.Option("--seed", help="Of the weights.")] = 0,
    layers: Annotated[
        str,
        typer.Option(
            "--layers", help="Ratios: 0 window only, 4 selected, 128 all entries."
        ),
    ] = "0,0,4,128,4,128",
) -> None:
    """Write a small random DeepSeek-V4 checkpoint, draft included, to try things on.

    Names, shapes and short floats are laid out as in the published checkpoint, so that
    convert, generate and bench read it as they would read that one.
    """
    with one_line_errors():
        ratios = _ratios(layers)
        count = len(ratios)
        write_tiny_v4(
            folder,
            seed,
            compress_ratios=[*ratios, 0, 0, 0],
            num_hidden_layers=count,
            num_hash_layers=min(2, count),
            dspark_target_layer_ids=list(range(max(0, count - 3), count)),
        )
    size = (folder / SINGLE).stat().st_size
    Console().print(f"{folder}: {count} layers, 3 draft stages, {decimal(size)}")


def _ratios(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"`layers` is {text!r}; allowed: numbers with commas, such as 0,4,128"
        ) from None
