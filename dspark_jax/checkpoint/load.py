"""Parameters of a published or converted checkpoint, placed on devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from dspark_jax.checkpoint import store
from dspark_jax.checkpoint.hf_config import Kind, read_json
from dspark_jax.checkpoint.names import Path as LeafPath
from dspark_jax.checkpoint.names import declared_shapes
from dspark_jax.checkpoint.pair import check_pair, fit_draft
from dspark_jax.checkpoint.source import (
    Config,
    Part,
    Source,
    Tables,
    config_for_tables,
    open_source,
    with_dtype,
)
from dspark_jax.checkpoint.v4_config import is_v4
from dspark_jax.checkpoint.v4_source import holds_draft
from dspark_jax.config import DTYPES
from dspark_jax.config_draft import DraftConfig
from dspark_jax.config_v4 import V4Config
from dspark_jax.errors import CheckpointError
from dspark_jax.models.params import Tree, flatten, unflatten

__all__ = ["check_pair", "fit_draft", "read_config", "read_leaves", "read_params"]

ShardingFor = Callable[[LeafPath], Sharding | None]


def read_config(path: str | Path, part: Part = "target") -> tuple[Kind, Config]:
    """Kind and settings of a checkpoint in any supported format, checked.

    `part` says which model of files that hold a target and its draft.
    """
    if store.is_stored(path):
        header = store.read_header(_part_of(Path(path), part))
        return header.kind, header.config
    source = open_source(path, part=part)
    return source.kind, source.config


def read_params(
    path: str | Path,
    *,
    dtype: str | None = None,
    sharding_for: ShardingFor | None = None,
    tables: Tables = "own",
    part: Part = "target",
) -> tuple[Kind, Config, Tree]:
    """Reads a checkpoint.

    Args:
      path: a published folder, a `.gguf` file or a converted directory.
      dtype: of the parameters; None keeps the stored one.
      sharding_for: where a leaf goes, by path; None, or a result of None, is the
        default device. Every process keeps only what its devices hold.
      tables: `target` leaves a draft's own copies of the target's embedding and
        head out, so that the target's arrays serve.
      part: which model of files that hold a target and its draft (DeepSeek-V4); a
        checkpoint of one model is what it is.

    Returns:
      (kind, config, params): params as a plain nested dict.

    Raises:
      CheckpointError: anything wrong with the checkpoint, before weights are read.

    Example:
      >>> from dspark_jax.checkpoint.load import read_params
      >>> try:
      ...     read_params("no/such/checkpoint")
      ... except ValueError as error:
      ...     print(error)
      no/such/checkpoint does not exist
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}; allowed: None, {', '.join(DTYPES)}")
    place = sharding_for or (lambda path: None)
    if store.is_stored(path):
        return _read_stored(_part_of(Path(path), part), dtype, place, tables)
    source = open_source(path, dtype=dtype, tables=tables, part=part)
    leaves = {key: _put(value, place(key)) for key, value in read_leaves(source)}
    return source.kind, source.config, unflatten(leaves)


def read_leaves(source: Source) -> Iterator[tuple[LeafPath, np.ndarray]]:
    """Leaves of a source one by one, largest first.

    The order keeps the largest one from being read when memory is most broken up.
    """
    for key in sorted(source.shapes, key=lambda k: -_size(source.shapes[k])):
        yield key, source.read_leaf(key)


def has_own_draft(path: Path) -> bool:
    """Whether a checkpoint of a target brings its draft along."""
    if store.is_stored(path):
        return store.is_stored(path / store.DRAFT)
    config = path / "config.json"
    return config.is_file() and is_v4(read_json(config)) and holds_draft(path)


def _part_of(path: Path, part: Part) -> Path:
    """Where a part of a converted directory lies."""
    own = path / store.DRAFT
    return own if part == "draft" and store.is_stored(own) else path


def _size(leaf: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64))


def _put(value: np.ndarray, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])


def _refuse_short_floats(path: str | Path, config: Config, dtype: str) -> None:
    layers = config.backbone if isinstance(config, DraftConfig) else config
    if isinstance(layers, V4Config) and layers.weights != "float":
        raise CheckpointError(
            f"{path} holds 8-bit and 4-bit floats and `dtype` is {dtype!r}; "
            "expand them when the published checkpoint is converted, or leave "
            "`dtype` out"
        )


def _read_stored(
    path: str | Path, dtype: str | None, place: ShardingFor, tables: Tables
) -> tuple[Kind, Config, Tree]:
    header = store.read_header(path)
    config = config_for_tables(header.config, tables)
    if dtype is not None:
        _refuse_short_floats(path, config, dtype)
    wanted = declared_shapes(config)
    shardings = {key: place(key) for key in wanted}
    loaded: dict[LeafPath, jax.Array] = {}
    free = [key for key in wanted if shardings[key] is None]
    for key, value in store.load_leaves(path, header, free):
        loaded[key] = jnp.asarray(value)
    abstract = {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[key])
        for key, leaf in wanted.items()
        if shardings[key] is not None
    }
    if abstract:
        loaded |= flatten(store.load(path, unflatten(abstract)))
    if dtype is not None:
        config = with_dtype(config, dtype)
        for key, leaf in declared_shapes(config).items():
            loaded[key] = loaded[key].astype(leaf.dtype)
    return header.kind, config, unflatten({key: loaded[key] for key in wanted})
