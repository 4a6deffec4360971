"""Drafts in this library's own folder layout: config.json and safetensors.

The shipped drafts lie like this: parameter names are our paths joined by dots,
layers stacked, and the tables that a draft shares with its target are left out.
Matrices may be stored as 8-bit integers (`int8_rows`), with their scales under
`NAME:scale`.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save

from dspark_jax.checkpoint import int8_rows
from dspark_jax.config import to_json
from dspark_jax.config_draft import DraftConfig, draft_from_json
from dspark_jax.errors import CheckpointError
from dspark_jax.files import replace_text
from dspark_jax.models.draft.backbone import abstract_draft_params
from dspark_jax.models.params import Tree, check_tree, flatten, unflatten

FORMAT = "dspark-jax-draft"
# Versions: 2 has 8-bit matrices.
PLAIN, INT8 = 1, 2
SCALE = ":scale"


def is_native(folder: str | Path) -> bool:
    """Whether `folder` holds a draft in this layout."""
    try:
        header = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(header, dict) and header.get("format") == FORMAT


def read_native(folder: str | Path) -> tuple[DraftConfig, Tree]:
    """(config, params) of a draft folder; arrays on the default device.

    Raises:
      CheckpointError: another version, or tensors that do not match the config.
    """
    folder = Path(folder)
    config = read_native_config(folder)
    flat = _whole(load_file(folder / "model.safetensors"), config.backbone.dtype)
    params = unflatten({tuple(name.split(".")): x for name, x in flat.items()})
    try:
        check_tree(params, abstract_draft_params(config), "draft")
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    leaves = {path: jnp.asarray(x) for path, x in flatten(params).items()}
    return config, unflatten(leaves)


def read_native_config(folder: str | Path) -> DraftConfig:
    """The config of a draft folder.

    Raises:
      CheckpointError: another version.
    """
    return draft_from_json(_read_header(Path(folder))["draft"])


def write_native(
    folder: str | Path, config: DraftConfig, params: Tree, *, int8: bool = False
) -> None:
    """Writes a draft folder; files appear whole or not at all.

    Args:
      folder: made if needed; other files in it stay.
      config: the draft.
      params: stacked parameters.
      int8: store matrices as 8-bit integers. They are used in the config's dtype.
    """
    check_tree(params, abstract_draft_params(config), "draft")
    folder = Path(folder)
    staging = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        flat = {".".join(p): np.asarray(x) for p, x in flatten(params).items()}
        stored = _in_bytes(flat) if int8 else flat
        (staging / "model.safetensors").write_bytes(save(stored))
        (staging / "config.json").write_text(_header(config, INT8 if int8 else PLAIN))
        folder.mkdir(parents=True, exist_ok=True)
        # The config names the layout, so it comes last.
        for name in ("model.safetensors", "config.json"):
            os.replace(staging / name, folder / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def rewrite_native_config(folder: str | Path, config: DraftConfig) -> None:
    """Puts another config into a draft folder, whole or not at all.

    Raises:
      ValueError: parameters of other shapes or names than those in the folder.
    """
    folder = Path(folder)
    before = flatten(abstract_draft_params(read_native_config(folder)))
    if flatten(abstract_draft_params(config)) != before:
        raise ValueError(f"`config` declares other parameters than {folder} holds")
    version = _read_header(folder)["version"]
    replace_text(folder / "config.json", _header(config, version))


def _read_header(folder: Path) -> dict[str, Any]:
    header = json.loads((folder / "config.json").read_text())
    if header.get("version") not in (PLAIN, INT8):
        raise CheckpointError(
            f"{folder} has draft format version {header.get('version')!r}; this "
            f"library reads {PLAIN} and {INT8}"
        )
    return header


def _header(config: DraftConfig, version: int) -> str:
    header = {"format": FORMAT, "version": version, "draft": to_json(config)}
    return json.dumps(header, indent=2, sort_keys=True) + "\n"


def _in_bytes(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Matrices as 8-bit integers beside their scales, the rest as it is."""
    out: dict[str, np.ndarray] = {}
    for name, x in flat.items():
        axes = 3 if name.startswith("layers.") else 2
        if x.ndim < axes or x.shape[-2] == 1:
            out[name] = x
        else:
            out[name], out[name + SCALE] = int8_rows.quantise(x)
    return out


def _whole(stored: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Tensors as they are used: 8-bit ones in `dtype`."""
    return {
        name: int8_rows.dequantise(x, stored[name + SCALE]).astype(jnp.dtype(dtype))
        if name + SCALE in stored
        else x
        for name, x in stored.items()
        if not name.endswith(SCALE)
    }
