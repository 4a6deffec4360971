"""What the commands share: options, errors, loading."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, cast

import jax
import typer
from rich.console import Console

from dspark_jax.errors import CacheFull
from dspark_jax.model import Model, load
from pallas_kernels import Implementation

ModelOption = Annotated[
    str,
    typer.Option("--model", help="A known name, a folder, a .gguf file or org/name."),
]
DraftOption = Annotated[
    str,
    typer.Option(
        "--draft", help="The draft: a path, auto (the one shipped) or none (plain)."
    ),
]
DraftLengthOption = Annotated[
    int | None,
    typer.Option("--draft-length", help="Drafts a round; default: all, 0: plain."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", help="float32, bfloat16 or float16; default: as stored."),
]
WeightsOption = Annotated[
    str,
    typer.Option("--weights", help="float, or int8: smaller and faster on a CPU."),
]
ImplementationOption = Annotated[
    Implementation | None,
    typer.Option(
        "--implementation",
        help="Of sampling and verification: reference or pallas; default: by device.",
    ),
]
CacheOption = Annotated[
    Path | None,
    typer.Option("--cache", help="Where known models are converted to, once."),
]
CompileCacheOption = Annotated[
    Path | None,
    typer.Option("--compile-cache", help="Keep compiled programs in this folder."),
]


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns the library's errors into one line on stderr and exit status 2."""
    try:
        yield
    except (ValueError, CacheFull) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None


def use_compile_cache(folder: Path | None) -> None:
    """Lets JAX keep every compiled program of this process in `folder`."""
    if folder is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs count as well: there are many of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Says on a terminal what takes a while; nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def load_model(
    name: str,
    draft: str,
    dtype: str | None,
    cache: Path | None,
    implementation: Implementation | None = None,
    weights: str = "float",
) -> Model:
    """Loads what the options name."""
    with working(f"loading {name}"):
        return load(
            name,
            None if draft == "none" else draft,
            dtype=dtype,
            # Anything else is refused by name.
            weights=cast(Literal["float", "int8"], weights),
            implementation=implementation,
            cache_dir=cache,
        )
