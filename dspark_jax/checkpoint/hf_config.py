"""A published `config.json`: which kind of model it is, and its settings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from dspark_jax.checkpoint.hf_decoder import (
    TARGET_ARCHITECTURES,
    eos_ids,
    target_config,
)
from dspark_jax.checkpoint.hf_draft import DRAFT_ARCHITECTURES, draft_config, is_draft
from dspark_jax.checkpoint.hf_fields import Json
from dspark_jax.checkpoint.vocabulary import AnyTarget
from dspark_jax.config import DecoderConfig
from dspark_jax.config_draft import DraftConfig
from dspark_jax.errors import CheckpointError

Kind = Literal["target", "draft"]


def parse_config(
    data: Json, names: Collection[str] = ()
) -> tuple[Kind, DecoderConfig | DraftConfig]:
    """Kind and settings of a model.

    Args:
      data: the parsed `config.json`.
      names: tensors in the files, without a common prefix.

    Raises:
      CheckpointError: anything that is not supported, by name.
    """
    if is_draft(data):
        return "draft", draft_config(data, names)
    architectures = data.get("architectures") or []
    if architectures and architectures[0] not in TARGET_ARCHITECTURES:
        known = ", ".join([*TARGET_ARCHITECTURES, *DRAFT_ARCHITECTURES])
        raise CheckpointError(
            f"config.json: architecture {architectures[0]!r} is not supported; "
            f"supported: {known}, and speculators drafts (dspark, dflash)"
        )
    return "target", target_config(data)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError when it is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return data


def with_generation_eos(config: AnyTarget, folder: Path) -> AnyTarget:
    """`config` with the end ids of `generation_config.json`, if it names any.

    That file lists all ids that end a turn; `config.json` often only one.
    """
    path = folder / "generation_config.json"
    ids = eos_ids(read_json(path)) if path.is_file() else None
    return config if ids is None else dataclasses.replace(config, eos_ids=ids)
