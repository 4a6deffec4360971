"""One published checkpoint, checked and ready to be read leaf by leaf.

`open_source` finds the format, parses the config and compares every tensor with
what the config needs, so that all that can be wrong with a checkpoint is known
before the first weight is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dspark_jax.checkpoint.block_scales import full_precision
from dspark_jax.checkpoint.gguf_source import FREQUENCIES, GgufFile, gguf_config
from dspark_jax.checkpoint.hf_config import (
    Kind,
    parse_config,
    read_json,
    with_generation_eos,
)
from dspark_jax.checkpoint.hf_decoder import text_config
from dspark_jax.checkpoint.hf_draft import EMBED_NAME, HEAD_NAME
from dspark_jax.checkpoint.names import (
    GGUF,
    HF,
    Layout,
    Shapes,
    check_names,
    declared_shapes,
    expected,
    strip_prefix,
)
from dspark_jax.checkpoint.names import Path as LeafPath
from dspark_jax.checkpoint.safetensors_source import SafetensorsFolder, refuse_pickle
from dspark_jax.checkpoint.tensors import FLOATS, Tensors, read
from dspark_jax.checkpoint.v4_config import is_v4
from dspark_jax.checkpoint.v4_source import Part, open_v4, origin_of
from dspark_jax.checkpoint.vocabulary import (
    absolute_ids,
    check_vocabulary,
    tokenizer_size,
)
from dspark_jax.config import DTYPES, DecoderConfig
from dspark_jax.config_draft import DraftConfig, TargetConfig
from dspark_jax.config_v4 import V4Config
from dspark_jax.errors import CheckpointError

Tables = Literal["own", "target"]
Config = TargetConfig | DraftConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)
D2T: LeafPath = ("d2t",)


@dataclasses.dataclass(frozen=True)
class Source:
    """A checked checkpoint.

    Attributes:
      kind: target or draft.
      config: its settings; `dtype` is the dtype that leaves are read in.
      format: `safetensors` or `gguf`.
      shapes: shape and dtype of every leaf, by path.
      tensors: the files.
      names: tensors that fill a leaf: one, or several in order (layers, experts).
      constants: small leaves that were made while checking.
      tokenizer: files that belong to the tokenizer, by name.
      metadata: metadata of a GGUF file, else None.
      origin: where it came from, ready for JSON.
    """

    kind: Kind
    config: Config
    format: str
    shapes: Shapes
    tensors: Tensors
    names: Mapping[LeafPath, tuple[str, ...]]
    constants: Mapping[LeafPath, np.ndarray]
    tokenizer: Mapping[str, Path]
    metadata: Mapping[str, Any] | None
    origin: Mapping[str, Any]

    def read_leaf(self, path: LeafPath) -> np.ndarray:
        """A whole parameter in its declared shape and dtype, parts stacked."""
        if path in self.constants:
            return self.constants[path]
        leaf, names = self.shapes[path], self.names[path]
        out = np.empty(leaf.shape, leaf.dtype)
        if self.tensors.info[names[0]].shape == leaf.shape:
            self.tensors.read_into(names[0], out)
            return out
        for index, name in enumerate(names):
            self.tensors.read_into(name, out[index])
        return out


def open_source(
    path: str | Path,
    *,
    dtype: str | None = None,
    tables: Tables = "own",
    part: Part = "target",
) -> Source:
    """Opens and checks a published folder or a `.gguf` file.

    Args:
      path: the folder, or the file.
      dtype: what to read parameters as; None: as they are stored (8-bit and block
        formats: bfloat16, but for DeepSeek-V4, which keeps its short floats).
      tables: whether a draft's own copies of the target's embedding and head are
        read (`own`) or left to the target (`target`).
      part: which model of files that hold a target and its draft (DeepSeek-V4).

    Raises:
      CheckpointError: whatever is wrong, before any weight is read.
    """
    path = Path(path)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}; allowed: None, {', '.join(DTYPES)}")
    refuse_pickle(path)
    if path.suffix == ".gguf" and path.is_file():
        return _open_gguf(path, dtype)
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; allowed: a folder with config.json and safetensors "
            "files, a .gguf file, or a converted directory"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    data = read_json(path / "config.json")
    if is_v4(data):
        return _open_v4(path, data, dtype, part)
    # An unsupported model is reported as such, whatever its files look like.
    parse_config(data)
    return _open_folder(path, data, dtype, tables)


def _open_folder(
    folder: Path, data: dict[str, Any], dtype: str | None, tables: Tables
) -> Source:
    files = SafetensorsFolder(folder)
    settings = text_config(data).get("quantization_config")
    settings = settings or data.get("quantization_config")
    tensors = full_precision(files, settings)
    found = strip_prefix(tensors.info)
    kind, config = parse_config(data, found)
    if isinstance(config, DecoderConfig):
        config = with_generation_eos(config, folder)
    else:
        config = config_for_tables(config, tables)
    tokenizer = _tokenizer_files(folder)
    if isinstance(config, DecoderConfig) and "tokenizer.json" in tokenizer:
        config = check_vocabulary(config, tokenizer_size(tokenizer["tokenizer.json"]))
    source = _match(tensors, found, kind, config, HF, dtype)
    origin = {
        "format": "safetensors",
        "name": folder.resolve().name,
        "architecture": (data.get("architectures") or [data.get("model_type")])[0],
        "files": {file.name: file.stat().st_size for file in files.files},
    }
    return dataclasses.replace(
        source, format="safetensors", tokenizer=tokenizer, origin=origin
    )


def _open_v4(folder: Path, data: dict[str, Any], dtype: str | None, part: Part):
    config, tensors, shapes, names = open_v4(folder, data, dtype, part)
    tokenizer = {}
    if isinstance(config, V4Config):
        config = with_generation_eos(config, folder)
        tokenizer = _tokenizer_files(folder)
        if "tokenizer.json" in tokenizer:
            size = tokenizer_size(tokenizer["tokenizer.json"])
            config = check_vocabulary(config, size)
    return Source(
        kind=part,
        config=config,
        format="safetensors",
        shapes=shapes,
        tensors=tensors,
        names=names,
        constants={},
        tokenizer=tokenizer,
        metadata=None,
        origin=origin_of(folder, data),
    )


def _tokenizer_files(folder: Path) -> dict[str, Path]:
    paths = {name: folder / name for name in TOKENIZER_FILES}
    return {name: path for name, path in paths.items() if path.is_file()}


def _open_gguf(path: Path, dtype: str | None) -> Source:
    file = GgufFile(path)
    config = gguf_config(file)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    config = check_vocabulary(config, len(tokens) if tokens else None)
    found = {name: name for name in file.info if name != FREQUENCIES}
    source = _match(file, found, "target", config, GGUF, dtype or config.dtype)
    origin = {
        "format": "gguf",
        "name": path.name,
        "architecture": file.metadata["general.architecture"],
        "files": {path.name: path.stat().st_size},
    }
    return dataclasses.replace(
        source, format="gguf", metadata=file.metadata, origin=origin
    )


def _match(
    tensors: Tensors,
    found: Mapping[str, str],
    kind: Kind,
    config: Config,
    layout: Layout,
    dtype: str | None,
) -> Source:
    """Compares names, shapes and dtypes; the rest of the source is filled in later."""
    found = dict(found)
    allowed = _settle_tables(tensors, found, config, layout)
    shapes = declared_shapes(config)
    constants: dict[LeafPath, np.ndarray] = {}
    if isinstance(config, DraftConfig):
        constants = _id_maps(tensors, found, config)
        allowed |= {"d2t", "t2d"}
    needed = {path: leaf for path, leaf in shapes.items() if path not in constants}
    assert not isinstance(config, V4Config)
    slots = expected(config, needed, layout)
    stored = {short: tensors.info[name].shape for short, name in found.items()}
    check_names(slots, stored, allowed)
    dtypes = {tensors.info[found[name]].dtype for name in slots}
    odd = [n for n in slots if tensors.info[found[n]].dtype.name not in FLOATS]
    if odd:
        raise CheckpointError(
            f"{odd[0]} is stored as {tensors.info[found[odd[0]]].dtype.name}, which is "
            f"no weight dtype that is read; supported: {', '.join(FLOATS)}"
        )
    config = with_dtype(config, dtype or _stored_dtype(config, dtypes))
    names: dict[LeafPath, list[str]] = {}
    for short, slot in slots.items():
        # Layers come in order, so that position in the list is the index.
        names.setdefault(slot.path, []).append(found[short])
    return Source(
        kind=kind,
        config=config,
        format="",
        shapes=declared_shapes(config),
        tensors=tensors,
        names={path: tuple(listed) for path, listed in names.items()},
        constants=constants,
        tokenizer={},
        metadata=None,
        origin={},
    )


def with_dtype(config: Config, dtype: str) -> Config:
    """`config` with its parameters in `dtype`."""
    if isinstance(config, DraftConfig):
        backbone = dataclasses.replace(config.backbone, dtype=dtype)
        return dataclasses.replace(config, backbone=backbone)
    return dataclasses.replace(config, dtype=dtype)


def _stored_dtype(config: Config, dtypes: set[np.dtype]) -> str:
    """What is stored decides, not what `config.json` says about it."""
    declared = (config.backbone if isinstance(config, DraftConfig) else config).dtype
    names = {dtype.name for dtype in dtypes}
    if len(names) == 1 and names <= set(DTYPES):
        return names.pop()
    return declared


def config_for_tables(config: Config, tables: Tables) -> Config:
    """A draft's `config` without tables of its own when `tables` is `target`.

    A draft whose vocabulary is reduced keeps them: its head has rows of its own.
    """
    if tables not in ("own", "target"):
        raise ValueError(f"`tables` is {tables!r}; allowed: 'own', 'target'")
    if tables == "own" or not isinstance(config, DraftConfig):
        return config
    if config.draft_vocab_size is not None:
        return config
    return dataclasses.replace(config, own_embed=False, own_head=False)


def _settle_tables(
    tensors: Tensors, found: dict[str, str], config: Config, layout: Layout
) -> set[str]:
    """Decides which table serves as embedding and head; changes `found`.

    Returns:
      Stored tables that are not read.
    """
    embed, head = (
        layout.name(("embed", "weight"), None),
        layout.name(("lm_head", "weight"), None),
    )
    if isinstance(config, DraftConfig):
        return {EMBED_NAME, HEAD_NAME}
    if not isinstance(config, DecoderConfig) or not config.tie_embeddings:
        return set()
    if embed not in found and head in found:
        # Writers that store shared tensors once may keep the other name.
        found[embed] = found.pop(head)
    elif head in found and not _equal(tensors, found[embed], found[head]):
        raise CheckpointError(
            f"config.json ties the output head to the embedding, but {found[head]} "
            f"differs from {found[embed]}"
        )
    return {head}


def _equal(tensors: Tensors, first: str, second: str) -> bool:
    a, b = tensors.info[first], tensors.info[second]
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(np.array_equal(read(tensors, first), read(tensors, second)))


def _id_maps(
    tensors: Tensors, found: Mapping[str, str], config: DraftConfig
) -> dict[LeafPath, np.ndarray]:
    if "d2t" not in found:
        if config.draft_vocab_size is None:
            return {}
        raise CheckpointError(
            f"the draft has a vocabulary of its own ({config.draft_vocab_size} ids) "
            "but no tensor `d2t` that maps it to the target's"
        )
    offsets = read(tensors, found["d2t"])
    if offsets.shape != (config.head_rows,):
        raise CheckpointError(
            f"`d2t` has shape {offsets.shape}; expected ({config.head_rows},)"
        )
    reverse = read(tensors, found["t2d"]) if "t2d" in found else None
    ids = absolute_ids(offsets, config.backbone.vocab_size, reverse)
    if config.draft_vocab_size is not None:
        return {D2T: ids}
    if not np.array_equal(ids, np.arange(ids.size)):
        raise CheckpointError("`d2t` reorders a vocabulary as large as the target's")
    return {}
