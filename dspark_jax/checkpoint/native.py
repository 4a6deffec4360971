"""Drafts in this library's own folder layout: config.json and safetensors.

The shipped drafts lie like this: parameter names are our paths joined by dots,
layers stacked, and the tables that a draft shares with its target are left out.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save

from dspark_jax.checkpoint.replacing import replace_text
from dspark_jax.config import DraftConfig, draft_from_json, to_json
from dspark_jax.errors import CheckpointError
from dspark_jax.models.draft.backbone import abstract_draft_params
from dspark_jax.models.params import Tree, check_tree, flatten, unflatten

FORMAT, VERSION = "dspark-jax-draft", 1


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
    flat = load_file(folder / "model.safetensors")
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
    folder = Path(folder)
    header = json.loads((folder / "config.json").read_text())
    if header.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} has draft format version {header.get('version')!r}; this "
            f"library reads {VERSION}"
        )
    return draft_from_json(header["draft"])


def write_native(folder: str | Path, config: DraftConfig, params: Tree) -> None:
    """Writes a draft folder; files appear whole or not at all.

    Args:
      folder: made if needed; other files in it stay.
      config: the draft.
      params: stacked parameters.
    """
    check_tree(params, abstract_draft_params(config), "draft")
    folder = Path(folder)
    staging = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        flat = {".".join(p): np.asarray(x) for p, x in flatten(params).items()}
        (staging / "model.safetensors").write_bytes(save(flat))
        (staging / "config.json").write_text(_header(config))
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
    replace_text(folder / "config.json", _header(config))


def _header(config: DraftConfig) -> str:
    header = {"format": FORMAT, "version": VERSION, "draft": to_json(config)}
    return json.dumps(header, indent=2, sort_keys=True) + "\n"
