"""Files of a training run: resumable state, the exported draft."""

from __future__ import annotations

import os
import pathlib
import pickle
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dspark_jax.checkpoint.native import write_native
from dspark_jax.config import DraftConfig
from dspark_jax.models.params import Tree, flatten, unflatten


def save_state(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a training state so that a crash leaves the old one or the new one."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        pickle.dump(jax.device_get(content), file, protocol=5)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def load_state(path: pathlib.Path) -> dict[str, Any]:
    """Reads what `save_state` wrote; only for files of one's own runs."""
    with path.open("rb") as file:
        return pickle.load(file)


def export(
    folder: pathlib.Path, config: DraftConfig, params: Tree, frozen: Tree, card: str
) -> None:
    """Writes a draft folder with a model card.

    Weights become bfloat16. The factors that training divides the features by go
    into `fc`.
    """
    flat = dict(flatten(jax.device_get(params)))
    flat[("fc", "weight")] = flat[("fc", "weight")] / np.asarray(frozen["scale"])[None]
    flat = {path: leaf.astype(ml_dtypes.bfloat16) for path, leaf in flat.items()}
    flat[("d2t",)] = np.asarray(frozen["d2t"], np.int32)
    write_native(folder, config, unflatten(flat))
    (folder / "README.md").write_text(card)
