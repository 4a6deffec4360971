"""Facts about a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.checkpoint import native, store
from dspark_jax.checkpoint.names import Shapes, declared_shapes
from dspark_jax.checkpoint.source import open_source
from dspark_jax.config import to_json


def describe(path: str | Path) -> dict[str, Any]:
    """What a checkpoint is, ready for JSON.

    Args:
      path: a published folder, a `.gguf` file, a converted directory or a draft in
        this library's own layout.

    Returns:
      format, kind, config, parameters, bytes, families (name, shape, dtype and
      bytes of every leaf, largest first), origin, and for a converted directory
      the library version that made it.

    Raises:
      CheckpointError: anything wrong with it.
    """
    if store.is_stored(path):
        header = store.read_header(path)
        facts = _facts("orbax", header.kind, header.config, header.shapes)
        origin = dict(header.source)
        return {**facts, "origin": origin, "library": header.library}
    if native.is_native(path):
        config, _ = native.read_native(path)
        shapes = declared_shapes(config)
        return {**_facts("native draft", "draft", config, shapes), "origin": {}}
    source = open_source(path)
    facts = _facts(source.format, source.kind, source.config, source.shapes)
    return {**facts, "origin": dict(source.origin)}


def _facts(form: str, kind: str, config: Any, shapes: Shapes) -> dict[str, Any]:
    families = [
        {
            "name": store.leaf_name(key),
            "shape": list(leaf.shape),
            "dtype": np.dtype(leaf.dtype).name,
            "bytes": store.leaf_bytes(leaf),
        }
        for key, leaf in shapes.items()
    ]
    return {
        "format": form,
        "kind": kind,
        "config": to_json(config),
        "parameters": sum(int(np.prod(leaf.shape)) for leaf in shapes.values()),
        "bytes": sum(family["bytes"] for family in families),
        "families": sorted(families, key=lambda f: (-f["bytes"], f["name"])),
    }
