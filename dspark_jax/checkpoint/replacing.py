"""Files that change whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(file: Path, text: str) -> None:
    """Changes what a file holds, whole or not at all."""
    staged = file.with_name(f"{file.name}.partial-{os.getpid()}")
    try:
        with staged.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(staged, file)
    finally:
        staged.unlink(missing_ok=True)
