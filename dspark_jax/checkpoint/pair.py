"""Whether a draft fits a target, and making it fit where vocabularies differ."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.checkpoint.hf_draft import UNSTATED_LAYERS
from dspark_jax.config_draft import DraftConfig, TargetConfig
from dspark_jax.config_v4 import V4Config
from dspark_jax.errors import CheckpointError
from dspark_jax.models.params import Tree, flatten, unflatten


def check_pair(target: TargetConfig, draft: DraftConfig) -> DraftConfig:
    """Compares a draft's settings with a target's.

    A draft whose vocabulary is smaller has the target's first ids: it becomes a
    draft with a reduced vocabulary, whose map is the identity. Its parameters
    have to follow, see `fit_draft`.

    Args:
      target: the target.
      draft: the draft as it was read.

    Returns:
      The draft's settings for this target: its vocabulary, valid ids and depth.

    Raises:
      CheckpointError: everything that does not fit, in one message.
    """
    backbone, depth, vocab = draft.backbone, target.num_layers, target.vocab_size
    problems = []
    if backbone.hidden_size != target.hidden_size:
        problems.append(
            f"hidden size {backbone.hidden_size}, the target has {target.hidden_size}"
        )
    if draft.num_target_layers not in (depth, UNSTATED_LAYERS):
        problems.append(
            f"made for {draft.num_target_layers} target layers, the target has {depth}"
        )
    elif draft.target_layer_ids[-1] > draft.last_tap(depth):
        problems.append(
            f"target_layer_ids {list(draft.target_layer_ids)}, allowed with {depth} "
            f"target layers: -1..{draft.last_tap(depth)}"
        )
    if isinstance(backbone, V4Config) != isinstance(target, V4Config):
        problems.append(
            f"layers like {backbone.architecture}, the target is {target.architecture}"
        )
    if backbone.vocab_size > vocab:
        problems.append(
            f"vocabulary of {backbone.vocab_size}, the target has only {vocab}"
        )
    elif backbone.vocab_size < vocab and not draft.own_head:
        problems.append(
            f"vocabulary of {backbone.vocab_size} without an output head of its own, "
            f"the target has {vocab}"
        )
    if problems:
        raise CheckpointError(
            f"the draft does not belong to this target: {'; '.join(problems)}"
        )
    reduced = draft.draft_vocab_size
    if reduced is None and backbone.vocab_size < vocab:
        reduced = backbone.vocab_size
    return dataclasses.replace(
        draft,
        backbone=dataclasses.replace(
            backbone, vocab_size=vocab, valid_vocab=target.valid_vocab
        ),
        num_target_layers=depth,
        draft_vocab_size=reduced,
    )


def fit_draft(
    target: TargetConfig, draft: DraftConfig, params: Tree
) -> tuple[DraftConfig, Tree]:
    """A draft's settings and parameters for `target`.

    Args:
      target: the target.
      draft: the draft as it was read.
      params: its parameters.

    Returns:
      (settings, parameters): unchanged parameters when the vocabularies agree.
      Otherwise tables over the draft's vocabulary that are indexed by target ids
      (embedding, Markov `w1`) get rows of zeros for the ids it does not have, and
      `d2t` says which ids its head's rows are.

    Raises:
      CheckpointError: see `check_pair`.
    """
    fitted = check_pair(target, draft)
    extra = target.vocab_size - draft.backbone.vocab_size
    if not extra:
        return fitted, params
    flat = flatten(params)
    for path in (("embed", "weight"), ("markov", "w1", "weight")):
        if path in flat:
            flat[path] = _pad_rows(flat[path], extra)
    if draft.draft_vocab_size is None:
        flat[("d2t",)] = jnp.arange(draft.backbone.vocab_size, dtype=jnp.int32)
    return fitted, unflatten(flat)


def _pad_rows(table: jax.Array, extra: int) -> jax.Array:
    return jnp.pad(table, ((0, extra), (0, 0)))
