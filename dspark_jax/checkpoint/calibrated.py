"""Where a draft on disk keeps temperatures and shifts of its confidences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from dspark_jax.checkpoint import native, store
from dspark_jax.config_draft import DraftConfig
from dspark_jax.errors import CheckpointError


def read_draft_config(path: str | Path) -> DraftConfig:
    """The config of a draft that `write_temperatures` can change.

    Raises:
      CheckpointError: anything but a draft in one of this library's two layouts.
    """
    if native.is_native(path):
        return native.read_native_config(path)
    if not store.is_stored(path):
        raise CheckpointError(
            f"{path} is not a draft in this library's own layout, and published files "
            f"are left as they are; convert it (`dspark-jax convert {path} DST`) and "
            "calibrate DST"
        )
    config = store.read_header(path).config
    if not isinstance(config, DraftConfig):
        raise CheckpointError(f"{path} is a target; only drafts have confidences")
    return config


def write_temperatures(
    path: str | Path,
    temperatures: Sequence[float] | None,
    calibrated_at: float | None,
    shifts: Sequence[float] | None = None,
) -> DraftConfig:
    """Stores the result of a calibration with a draft; its weights stay.

    Args:
      path: a draft folder in this library's layout or a converted directory.
      temperatures: one for each drafted position; None takes an earlier
        calibration out.
      calibrated_at: the sampling temperature of the rounds that were fitted.
      shifts: as many as temperatures; None takes those of an earlier calibration out,
        which is the same as zeros.

    Returns:
      The config as it is stored now.

    Raises:
      CheckpointError: see `read_draft_config`.
      ValueError: another number of temperatures or shifts than the draft has
        positions; shifts without temperatures.
    """
    config = dataclasses.replace(
        read_draft_config(path),
        confidence_temperatures=_floats(temperatures),
        confidence_shifts=_floats(shifts),
        calibrated_at=None if calibrated_at is None else float(calibrated_at),
    )
    if native.is_native(path):
        native.rewrite_native_config(path, config)
    else:
        store.rewrite_config(path, config)
    return config


def _floats(given: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if given is None else tuple(float(x) for x in given)
