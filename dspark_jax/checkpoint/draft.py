"""Reading a draft from any of the formats it may lie in."""

from __future__ import annotations

from pathlib import Path

from dspark_jax.checkpoint import native
from dspark_jax.checkpoint.load import ShardingFor, read_config, read_params
from dspark_jax.checkpoint.source import Tables
from dspark_jax.config_draft import DraftConfig
from dspark_jax.errors import CheckpointError
from dspark_jax.models.params import Tree


def read_draft(
    path: Path,
    *,
    dtype: str | None = None,
    tables: Tables = "own",
    sharding_for: ShardingFor | None = None,
) -> tuple[DraftConfig, Tree]:
    """Settings and parameters of a draft, as they were stored.

    Args:
      path: a trained draft's folder, a published folder or a converted directory.
      dtype: as for `read_params`; a trained draft keeps its own.
      tables: as for `read_params`.
      sharding_for: as for `read_params`; a trained draft lies on the default device.

    Raises:
      CheckpointError: no draft, or anything wrong with it.
    """
    if native.is_native(path):
        return native.read_native(path)
    kind, config = read_config(path, "draft")
    if kind != "draft" or not isinstance(config, DraftConfig):
        raise CheckpointError(f"{path} is a {kind}; a draft model is needed")
    _, found, params = read_params(
        path, dtype=dtype, tables=tables, sharding_for=sharding_for, part="draft"
    )
    assert isinstance(found, DraftConfig)
    return found, params
