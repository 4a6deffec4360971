"""Published checkpoint -> converted directory."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dspark_jax.checkpoint import store
from dspark_jax.checkpoint.load import has_own_draft, read_leaves
from dspark_jax.checkpoint.names import Path as LeafPath
from dspark_jax.checkpoint.source import Source, open_source
from dspark_jax.errors import CheckpointError

logger = logging.getLogger(__name__)

GGUF_TOKENIZER = "tokenizer_gguf.json"
# (step, bytes done, bytes in all); the step is "write" or "verify".
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Converted:
    """What a conversion made.

    Attributes:
      path: the directory.
      kind: `target` or `draft`.
      parameters: how many numbers.
      nbytes: bytes they take.
      verified: whether they were read back and compared.
    """

    path: Path
    kind: str
    parameters: int
    nbytes: int
    verified: bool


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str | None = None,
    verify: bool = True,
    progress: Progress | None = None,
) -> Converted:
    """Converts a published checkpoint to a directory that loads fast and sharded.

    Everything that can be wrong with the source is reported before the first byte
    is written; `dst` appears complete or not at all. Memory holds one parameter
    family (the same weight of all layers, one matrix of all experts of a layer, or
    one table) at a time. A draft in the same files is converted along, to the folder
    `draft` in `dst`.

    Args:
      src: a folder with `config.json` and safetensors files, or a `.gguf` file.
      dst: the directory to make; absent or empty.
      dtype: `float32`, `bfloat16` or `float16`; None keeps what is stored.
      verify: read every parameter back and compare checksums.
      progress: called as the bytes go by.

    Returns:
      What was made.

    Raises:
      CheckpointError: the source cannot be read, the destination is taken, or
        what was written differs from what was read.

    Example:
      >>> from dspark_jax.checkpoint.convert import convert
      >>> try:
      ...     convert("model.bin", "converted")
      ... except ValueError as error:
      ...     print(error)
      model.bin does not exist
    """
    if store.is_stored(src):
        raise CheckpointError(f"{src} is a converted checkpoint already")
    source = open_source(src, dtype=dtype)
    parts = [source]
    if has_own_draft(Path(src)):
        parts.append(open_source(src, dtype=dtype, part="draft"))
    store.check_free(dst)
    report = progress or (lambda step, done, total: None)
    done, total = 0, sum(map(_bytes, parts))

    def leaves(part: Source) -> Iterator[tuple[LeafPath, np.ndarray]]:
        nonlocal done
        for path, value in read_leaves(part):
            yield path, value
            done += value.nbytes
            del value
            report("write", done, total)

    def finish(made: Path) -> None:
        copy_tokenizer(source, made / store.TOKENIZER)
        if verify:
            verify_stored(made, report)
        for part in parts[1:]:
            write(made / store.DRAFT, part, check)

    def check(made: Path) -> None:
        if verify:
            verify_stored(made, report)

    def write(to: str | Path, part: Source, finish: store.Finish) -> None:
        store.save_streaming(
            to, part.kind, part.config, part.origin, leaves(part), finish
        )

    write(dst, source, finish)
    return Converted(
        path=Path(dst),
        kind=source.kind,
        parameters=sum(_parameters(part) for part in parts),
        nbytes=total,
        verified=verify,
    )


def _bytes(source: Source) -> int:
    return sum(store.leaf_bytes(leaf) for leaf in source.shapes.values())


def _parameters(source: Source) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in source.shapes.values())


def copy_tokenizer(source: Source, folder: Path) -> None:
    """Puts what the tokenizer is made from into `folder`."""
    table = {
        key: value
        for key, value in (source.metadata or {}).items()
        if key.startswith("tokenizer.")
    }
    if not table and not source.tokenizer:
        return
    folder.mkdir()
    for name, path in source.tokenizer.items():
        shutil.copyfile(path, folder / name)
    if table:
        text = json.dumps(table, ensure_ascii=False)
        (folder / GGUF_TOKENIZER).write_text(text, encoding="utf-8")


def verify_stored(
    path: Path, progress: Progress = lambda step, done, total: None
) -> None:
    """Reads every parameter back and compares it with its checksum.

    Raises:
      CheckpointError: parameters whose bytes are not those that were written.
    """
    header = store.read_header(path, unfinished=True)
    total = sum(store.leaf_bytes(leaf) for leaf in header.shapes.values())
    done, wrong = 0, []
    # Largest first, for the reason that `read_leaves` has.
    for key, leaf in sorted(
        header.shapes.items(), key=lambda x: -store.leaf_bytes(x[1])
    ):
        name = store.leaf_name(key)
        if store.stored_checksum(path, key, leaf) != header.checksums.get(name):
            wrong.append(name)
        done += store.leaf_bytes(leaf)
        progress("verify", done, total)
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} parameters read back differently: {', '.join(wrong[:5])}"
        )
    logger.info("%s: %d parameters verified", path, len(header.shapes))
