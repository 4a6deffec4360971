"""Converted checkpoints on disk: an Orbax directory. The only user of Orbax.

Beside the parameters a directory holds, as Orbax's custom metadata,

    {"format": 1, "kind": "target" | "draft", "config": {...}, "source": {...},
     "library": "x.y.z", "checksums": {"layers.full.q_proj.weight": crc32, ...}}

Parameters are written one leaf at a time, so that memory holds one of them.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import json
import logging
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from dspark_jax.checkpoint.hf_config import Kind
from dspark_jax.checkpoint.names import Path as LeafPath
from dspark_jax.checkpoint.names import Shapes, declared_shapes
from dspark_jax.checkpoint.tensors import pieces
from dspark_jax.config import to_json
from dspark_jax.config_draft import (
    DraftConfig,
    TargetConfig,
    draft_from_json,
    target_from_json,
)
from dspark_jax.errors import CheckpointError
from dspark_jax.files import replace_text
from dspark_jax.models.params import Tree, flatten, unflatten

logger = logging.getLogger(__name__)

FORMAT = 1
MARKER = "orbax.checkpoint"
TOKENIZER = "tokenizer"
# The draft that came in the same files as a target, a checkpoint of its own.
DRAFT = "draft"
# Orbax's own name for the file with `custom_metadata` in it.
CUSTOM_METADATA = "_CHECKPOINT_METADATA"
# A directory under construction: DST.partial-<process id>.
UNFINISHED = re.compile(r"\.partial-\d+$")

# Leaves are written together until they have this size: each write has a fixed cost.
BATCH_BYTES = 64 * 2**20

Finish = Callable[[Path], None]


@dataclasses.dataclass(frozen=True)
class Header:
    """What a stored checkpoint says about itself; shapes are the stored ones."""

    kind: Kind
    config: TargetConfig | DraftConfig
    source: Mapping[str, Any]
    library: str
    checksums: Mapping[str, int]
    shapes: Shapes


def is_stored(path: str | Path) -> bool:
    """Whether `path` is an Orbax directory."""
    return (Path(path) / MARKER).is_file()


def checksum(array: np.ndarray, before: int = 0) -> int:
    """CRC-32 of an array's bytes, after those that gave `before`."""
    data = np.ascontiguousarray(array)
    return zlib.crc32(memoryview(data.reshape(-1).view(np.uint8)), before)


def leaf_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of a leaf."""
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def leaf_name(path: LeafPath) -> str:
    """The name of a leaf in metadata and messages."""
    return ".".join(path)


def save_streaming(
    dst: str | Path,
    kind: Kind,
    config: TargetConfig | DraftConfig,
    source: Mapping[str, Any],
    leaves: Iterable[tuple[LeafPath, np.ndarray]],
    finish: Finish | None = None,
) -> None:
    """Writes a checkpoint leaf by leaf; `dst` appears complete or not at all.

    Args:
      dst: the directory to make; must not exist or be empty.
      kind: `target` or `draft`.
      config: its settings.
      source: where the parameters came from, ready for JSON.
      leaves: path and value of every leaf; consumed one by one.
      finish: called with the finished directory before it is moved to `dst`; what
        it adds or refuses counts as part of the write.

    Raises:
      CheckpointError: `dst` is taken.
    """
    dst = Path(dst).resolve()
    check_free(dst)
    work = dst.with_name(f"{dst.name}.partial-{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        made = work / "checkpoint"
        _write(made, kind, config, source, leaves)
        if finish is not None:
            finish(made)
        if dst.is_dir():
            dst.rmdir()
        made.rename(dst)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_free(dst: str | Path) -> None:
    """CheckpointError unless `dst` can be made: absent or an empty directory."""
    dst = Path(dst).resolve()
    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise CheckpointError(
            f"{dst} already exists; give another destination or remove it"
        )
    if dst.parent.is_dir():
        for left in dst.parent.glob(f"{dst.name}.partial-*"):
            logger.warning("%s is left over from a conversion that ended early", left)


def _write(
    made: Path,
    kind: Kind,
    config: TargetConfig | DraftConfig,
    source: Mapping[str, Any],
    leaves: Iterable[tuple[LeafPath, np.ndarray]],
) -> None:
    checksums: dict[str, int] = {}
    missing = set(declared_shapes(config))
    batch: dict[LeafPath, np.ndarray] = {}
    for path, value in leaves:
        checksums[leaf_name(path)] = checksum(value)
        missing.remove(path)
        batch[path] = value
        del value
        if missing and sum(leaf.nbytes for leaf in batch.values()) < BATCH_BYTES:
            continue
        metadata = None
        if not missing:
            metadata = {
                "format": FORMAT,
                "kind": kind,
                "config": to_json(config),
                "source": dict(source),
                "library": library_version(),
                "checksums": checksums,
            }
        with _context():
            ocp.partial.save(str(made), unflatten(batch), custom_metadata=metadata)
        batch.clear()
        # Orbax leaves what it saved in reference cycles.
        gc.collect()
    if missing:
        raise ValueError(f"no value for {leaf_name(min(missing))}")
    with _context():
        ocp.partial.finalize(str(made))


def _context() -> ocp.Context:
    context = ocp.Context()
    # A leaf is one uncompressed chunk that Orbax writes from the caller's memory:
    # compression and smaller chunks (2 GiB by default) each hold a second copy of it.
    context.array_options.saving.use_compression = False
    context.array_options.saving.ocdbt_target_data_file_size = 0
    context.memory_options.deepcopy_host_arrays = False
    return context


def read_header(path: str | Path, *, unfinished: bool = False) -> Header:
    """What a stored checkpoint says about itself.

    Args:
      path: the directory.
      unfinished: allow a directory that is still being written.

    Raises:
      CheckpointError: not one of ours, of another format, or unfinished.
    """
    path = Path(path).resolve()
    if not is_stored(path):
        raise CheckpointError(f"{path} is no converted checkpoint")
    partial = [part for part in path.parts if UNFINISHED.search(part)]
    if partial and not unfinished:
        raise CheckpointError(
            f"{path} belongs to a conversion that did not finish ({partial[0]})"
        )
    try:
        found = ocp.metadata(str(path))
        stored = flatten(found.metadata)
    except (AttributeError, OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    extra: dict[str, Any] = dict(found.custom_metadata or {})  # type: ignore[arg-type]
    if extra.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {extra.get('format')!r}; supported: {FORMAT}"
        )
    try:
        parse = {"target": target_from_json, "draft": draft_from_json}[extra["kind"]]
        config = parse(extra["config"])
        header = Header(
            kind=extra["kind"],
            config=config,
            source=extra["source"],
            library=extra["library"],
            checksums=extra["checksums"],
            shapes={
                key: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
                for key, leaf in stored.items()
            },
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has damaged metadata: {error!r}") from error
    _compare(path, declared_shapes(config), header.shapes)
    return header


def rewrite_config(path: str | Path, config: TargetConfig | DraftConfig) -> None:
    """Puts another config into a stored checkpoint; its parameters stay.

    Orbax has no call for this, so the one file that holds custom metadata is
    replaced, in one step: a reader sees the old config or the new one. What Orbax
    then reads is compared, and the old file is put back if it is not `config`.

    Args:
      path: the directory.
      config: declares the parameters that are stored.

    Raises:
      CheckpointError: not one of ours, or metadata that this Orbax keeps in
        another way.
      ValueError: a config with other parameters.
    """
    path = Path(path).resolve()
    header, file = read_header(path), path / CUSTOM_METADATA
    declared = declared_shapes(config)
    if type(config) is not type(header.config) or declared != header.shapes:
        raise ValueError(f"`config` declares other parameters than {path} holds")
    try:
        old = file.read_text(encoding="utf-8")
        data = json.loads(old)
        data["custom_metadata"]["config"] = to_json(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unknown_metadata(path) from error
    replace_text(file, json.dumps(data))
    if read_header(path).config != config:
        replace_text(file, old)
        raise _unknown_metadata(path)


def _unknown_metadata(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} does not keep its custom metadata in {CUSTOM_METADATA} as JSON; "
        "convert the checkpoint that it was made from with this version of Orbax"
    )


def load(path: str | Path, abstract: Tree) -> Tree:
    """Loads leaves into their shardings.

    Args:
      path: a stored checkpoint.
      abstract: nested dict of `jax.ShapeDtypeStruct`, each with a sharding; leaves
        that are not wanted are left out.

    Returns:
      The same nested dict with `jax.Array`s.

    Raises:
      CheckpointError: a shape or dtype that is not the stored one, by name.
      ValueError: a leaf without a sharding.
    """
    header = read_header(path)
    wanted = flatten(abstract)
    for key, leaf in wanted.items():
        if leaf.sharding is None:
            raise ValueError(f"{leaf_name(key)} has no sharding")
    _compare(Path(path), wanted, header.shapes, subset=True)
    return _load(path, wanted, header.shapes)


def load_leaves(
    path: str | Path, header: Header, wanted: Iterable[LeafPath]
) -> Iterator[tuple[LeafPath, np.ndarray]]:
    """Loads leaves as numpy arrays in their stored dtype, a bounded batch at a time."""
    batch: dict[LeafPath, np.ndarray] = {}
    size = 0
    wanted = list(wanted)
    for key in wanted:
        leaf = header.shapes[key]
        # Only shape and dtype are looked at: one element serves for all.
        batch[key] = np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
        size += leaf_bytes(leaf)
        if size >= BATCH_BYTES or key == wanted[-1]:
            yield from flatten(_load(path, batch, header.shapes)).items()
            batch, size = {}, 0


def stored_checksum(path: str | Path, key: LeafPath, leaf: jax.ShapeDtypeStruct) -> int:
    """`checksum` of a leaf as it lies on disk.

    Orbax would hold the leaf twice while it loads it. TensorStore, which Orbax
    writes with, keeps the leaf's only chunk cached and hands out slices of it.
    """
    base = (Path(path).resolve() / "state").as_uri() + "/"
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": base, "path": f"{leaf_name(key)}/"},
    }
    row_bytes = leaf_bytes(leaf) // leaf.shape[0]
    limit = {"cache_pool": {"total_bytes_limit": 2 * leaf_bytes(leaf) + 2**20}}
    try:
        array = ts.open(spec, open=True, read=True, context=ts.Context(limit)).result()
        crc = 0
        for start, stop in pieces(leaf.shape[0], row_bytes):
            crc = checksum(array[start:stop].read().result(), crc)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {leaf_name(key)}: {error}") from error
    return crc


def _load(path: str | Path, wanted: Mapping[LeafPath, Any], shapes: Shapes) -> Tree:
    # Orbax wants the whole tree; leaves that are not loaded are placeholders.
    full = {key: wanted.get(key, ocp.PLACEHOLDER) for key in shapes}
    loaded = flatten(ocp.load(str(Path(path).resolve()), unflatten(full)))
    return unflatten({key: loaded[key] for key in wanted})


def _compare(path: Path, wanted: Shapes, stored: Shapes, subset: bool = False) -> None:
    problems = [f"{leaf_name(key)} is missing" for key in wanted if key not in stored]
    if not subset:
        problems += [f"{leaf_name(k)} is unknown" for k in stored if k not in wanted]
    for key, leaf in wanted.items():
        if key not in stored:
            continue
        have, want = stored[key], leaf
        if tuple(have.shape) != tuple(want.shape) or have.dtype != want.dtype:
            problems.append(
                f"{leaf_name(key)} is {have.dtype}{list(have.shape)}, "
                f"not {want.dtype}{list(want.shape)}"
            )
    if problems:
        raise CheckpointError(
            f"{path}: {len(problems)} leaves do not match: {'; '.join(problems[:5])}"
        )


def library_version() -> str:
    """Version of this library."""
    try:
        return importlib.metadata.version("dspark-jax")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def save_arrays(path: str | Path, arrays: Mapping[str, jax.Array]) -> None:
    """Writes arrays by name to a new directory, each process its shards."""
    ocp.save(str(Path(path).resolve()), dict(arrays))


def load_arrays(
    path: str | Path, abstract: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Arrays that `save_arrays` wrote, each placed as its entry's sharding says.

    Raises:
      CheckpointError: they are not there, or have other shapes or dtypes.
    """
    try:
        found = ocp.load(str(Path(path).resolve()), dict(abstract))
    except (KeyError, OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return dict(found)
