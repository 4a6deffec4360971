"""A trained draft as a folder that `load` reads."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from dspark_jax.checkpoint.native import write_native
from dspark_jax.config_draft import DraftConfig
from dspark_jax.models.params import Tree, flatten, unflatten


def export_draft(
    folder: str | Path,
    config: DraftConfig,
    params: Tree,
    frozen: Tree,
    *,
    int8: bool = False,
) -> None:
    """Writes a draft folder; its files appear whole or not at all.

    Args:
      folder: made if needed.
      config: the draft; matrices are stored in its dtype.
      params: float32 trained weights.
      frozen: `scale` float32[m * H], which training divides the features by and which
        goes into `fc` here, and `d2t` with a reduced vocabulary.
      int8: store matrices as 8-bit integers with a scale a row.
    """
    flat = {path: np.asarray(x) for path, x in flatten(jax.device_get(params)).items()}
    scale = np.asarray(frozen["scale"])[None]
    flat[("fc", "weight")] = flat[("fc", "weight")] / scale
    dtype = jax.numpy.dtype(config.backbone.dtype)
    flat = {path: leaf.astype(dtype) for path, leaf in flat.items()}
    if "d2t" in frozen:
        flat[("d2t",)] = np.asarray(frozen["d2t"], np.int32)
    write_native(folder, config, unflatten(flat), int8=int8)
