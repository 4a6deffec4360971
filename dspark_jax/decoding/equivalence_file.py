"""Digests of probed programs on disk, so that a server need not probe at each start."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from dspark_jax.decoding.equivalence import Digests, Kind, Shape
from dspark_jax.files import replace_text

logger = logging.getLogger(__name__)


def save_digests(
    path: str | Path, key: Mapping[str, object], digests: Mapping[Shape, Digests]
) -> None:
    """Writes digests, whole or not at all; what `path` held is gone."""
    shapes = [
        [shape.kind, shape.batch, shape.rows, shape.capacity, list(found)]
        for shape, found in sorted(digests.items())
    ]
    text = json.dumps({"key": dict(key), "shapes": shapes}, indent=1)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text + "\n")


def load_digests(path: str | Path, key: Mapping[str, object]) -> dict[Shape, Digests]:
    """What was found under this key; nothing where there is none to be read."""
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        if stored["key"] != dict(key):
            logger.info("%s was probed for something else", path)
            return {}
        found: dict[Shape, Digests] = {}
        for kind, batch, rows, capacity, digests in stored["shapes"]:
            if kind not in get_args(Kind) or len(digests) != key["inputs"]:
                raise ValueError(f"no digests: {kind}")
            found[Shape(kind, batch, rows, capacity)] = tuple(digests)
        return found
    except FileNotFoundError:
        return {}
    # Not a file, no JSON, no such fields.
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s)", path, error)
        return {}
