"""Checks between vocabularies: model and tokenizer, draft and target."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TypeVar

import numpy as np

from dspark_jax.config_draft import TargetConfig
from dspark_jax.errors import CheckpointError

AnyTarget = TypeVar("AnyTarget", bound=TargetConfig)


def check_vocabulary(config: AnyTarget, tokenizer_size: int | None) -> AnyTarget:
    """Compares a model's vocabulary with its tokenizer's.

    Args:
      config: the model.
      tokenizer_size: number of ids of the tokenizer; None: not known.

    Returns:
      `config`; with `valid_vocab` set when the embedding has padding rows beyond
      the tokenizer's ids, so that those are never emitted.

    Raises:
      CheckpointError: the tokenizer has more ids than the model has rows.
    """
    if tokenizer_size is None or tokenizer_size == config.vocab_size:
        return config
    if tokenizer_size > config.vocab_size:
        raise CheckpointError(
            f"the model's vocabulary of {config.vocab_size} is smaller than the "
            f"tokenizer's {tokenizer_size} ids; they do not belong together"
        )
    return dataclasses.replace(config, valid_vocab=tokenizer_size)


def tokenizer_size(path: Path) -> int | None:
    """Ids of a `tokenizer.json`: its highest id + 1. None when it has no ids."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        vocab = (data.get("model") or {}).get("vocab") or {}
        # Unigram models list (token, score) pairs: the position is the id.
        ids = list(vocab.values()) if isinstance(vocab, dict) else range(len(vocab))
        added = [entry["id"] for entry in data.get("added_tokens") or ()]
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return max([*ids, *added], default=-1) + 1 or None


def absolute_ids(
    offsets: np.ndarray, vocab_size: int, in_target: np.ndarray | None = None
) -> np.ndarray:
    """Target ids of a reduced draft vocabulary.

    Args:
      offsets: int64[V_draft]. The stored map: target id minus draft id.
      vocab_size: V of the target.
      in_target: bool[V] or None. The stored reverse map: which target ids the
        draft has.

    Returns:
      int32[V_draft] absolute target ids.

    Raises:
      CheckpointError: an id out of range, two draft ids with one target id, or
        maps that contradict each other.
    """
    ids = np.arange(offsets.shape[0], dtype=np.int64) + offsets.astype(np.int64)
    if ids.size and not (0 <= ids.min() and ids.max() < vocab_size):
        raise CheckpointError(
            f"`d2t` maps to ids {ids.min()}..{ids.max()}; allowed: 0..{vocab_size - 1}"
        )
    values, counts = np.unique(ids, return_counts=True)
    if values.size != ids.size:
        twice = values[counts > 1][:5].tolist()
        raise CheckpointError(
            f"`d2t` maps several draft ids to the same target ids {twice}"
        )
    if in_target is not None:
        named = np.flatnonzero(in_target.astype(bool))
        if not np.array_equal(named, values):
            raise CheckpointError(
                f"`t2d` names {named.size} target ids, `d2t` {values.size}, and they "
                "differ"
            )
    return ids.astype(np.int32)
