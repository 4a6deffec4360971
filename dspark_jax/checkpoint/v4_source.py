"""Opening a DeepSeek-V4 checkpoint: a target, or the draft in the same files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dspark_jax.checkpoint.names import Path as LeafPath
from dspark_jax.checkpoint.names import Shapes, Slot, check_names, declared_shapes
from dspark_jax.checkpoint.safetensors_source import SafetensorsFolder
from dspark_jax.checkpoint.tensors import FLOATS, TensorInfo
from dspark_jax.checkpoint.v4_config import (
    ARCHITECTURE,
    STAGE,
    stage_count,
    v4_config,
    v4_draft_config,
)
from dspark_jax.checkpoint.v4_names import native_draft_names, native_names
from dspark_jax.checkpoint.v4_tensors import RAW, V4Tensors
from dspark_jax.config import DTYPES
from dspark_jax.config_draft import DraftConfig
from dspark_jax.config_v4 import V4Config
from dspark_jax.errors import CheckpointError

Part = Literal["target", "draft"]


def open_v4(
    folder: Path, data: Mapping[str, Any], dtype: str | None, part: Part
) -> tuple[V4Config | DraftConfig, V4Tensors, Shapes, dict[LeafPath, tuple[str, ...]]]:
    """A checked target or draft.

    Args:
      folder: the published folder.
      data: its parsed `config.json`.
      dtype: None keeps short floats with their scales; a name expands them.
      part: which of the two models in the files.

    Returns:
      (settings, tensors, declared shapes, tensors that fill each parameter).

    Raises:
      CheckpointError: whatever is wrong, before any weight is read.
    """
    tensors = V4Tensors(SafetensorsFolder(folder), expand=dtype is not None)
    target = _in_type(v4_config(data), tensors, dtype)
    is_draft = part == "draft"
    config: V4Config | DraftConfig = target
    if is_draft:
        found = v4_draft_config(data, target, tensors.info)
        if found is None or not _stages(tensors):
            raise CheckpointError(f"{folder} holds no draft (no tensors `mtp.*`)")
        config = found
    shapes = declared_shapes(config)
    count, stages = target.num_experts, stage_count(data, tensors.info)

    def stored_as(path: LeafPath) -> list[str]:
        if is_draft:
            return native_draft_names(path, count, stages)
        return native_names(path, count)

    names = {path: _fused(stored_as(path), tensors.info) for path in shapes}
    _check(shapes, names, tensors.info, is_draft)
    return config, tensors, shapes, names


def holds_draft(folder: Path) -> bool:
    """Whether a published folder has stages of a draft."""
    return _stages(V4Tensors(SafetensorsFolder(folder)))


def origin_of(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Where a checkpoint came from, ready for JSON."""
    files = SafetensorsFolder(folder).files
    return {
        "format": "safetensors",
        "name": folder.resolve().name,
        "architecture": (data.get("architectures") or [ARCHITECTURE])[0],
        "files": {file.name: file.stat().st_size for file in files},
    }


def _stages(tensors: V4Tensors) -> bool:
    return any(STAGE.match(name) for name in tensors.info)


def _in_type(config: V4Config, tensors: V4Tensors, dtype: str | None) -> V4Config:
    stored = tensors.info.get("embed.weight", TensorInfo((), RAW)).dtype.name
    kept = stored if stored in DTYPES else config.dtype
    short = tensors.quantised and dtype is None
    return dataclasses.replace(
        config, dtype=dtype or kept, weights="fp8_fp4" if short else "float"
    )


def _fused(names: list[str], info: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    """One tensor of all experts where the files have that."""
    if len(names) == 1 or names[0] in info:
        return tuple(names)
    before, _, after = names[0].partition(".experts.0.")
    whole = f"{before}.experts.{after.removesuffix('.weight')}"
    return (whole,) if whole in info else tuple(names)


def _check(
    shapes: Shapes,
    names: Mapping[LeafPath, tuple[str, ...]],
    info: Mapping[str, TensorInfo],
    is_draft: bool,
) -> None:
    slots: dict[str, Slot] = {}
    for path, leaf in shapes.items():
        stacked = len(names[path]) > 1
        for index, name in enumerate(names[path]):
            shape = leaf.shape[1:] if stacked else leaf.shape
            slots[name] = Slot(path, index if stacked else None, shape)
    found = {name: one.shape for name, one in info.items()}
    # The other model of the files is not looked at.
    others = {name for name in found if bool(STAGE.match(name)) != is_draft}
    check_names(slots, found, others)
    for name, slot in slots.items():
        want = np.dtype(shapes[slot.path].dtype)
        if (want == RAW) != (info[name].dtype == RAW):
            raise CheckpointError(
                f"{name} is stored as {info[name].dtype.name}: 8-bit and 4-bit weights "
                "are read when all matrices have them; give a `dtype` to expand them"
            )
        stored = info[name].dtype
        whole = want.kind in "iu"
        if not (stored.kind in "iu" if whole else stored.name in FLOATS):
            allowed = "whole numbers" if whole else ", ".join(FLOATS)
            raise CheckpointError(
                f"{name} is stored as {stored.name}; allowed: {allowed}"
            )
