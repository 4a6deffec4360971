"""Files that appear or change whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def staged(path: str | Path) -> Iterator[Path]:
    """A file beside `path` to write to, with its ending; it becomes `path` at the end.

    Nothing is left of it when the block fails.
    """
    path = Path(path)
    partial = path.with_name(f".{path.stem}.partial-{os.getpid()}{path.suffix}")
    try:
        yield partial
        # On disk before the name is: a crash leaves the old file or the new one.
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def replace_text(path: str | Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    with staged(path) as partial:
        partial.write_text(text, encoding="utf-8")
