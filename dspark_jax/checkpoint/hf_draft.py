"""A published `config.json` of a draft as a `DraftConfig`.

Three layouts: DeepSpec (the target's config with fields added), the original
DFlash (fields under `dflash_config`, no tables in the file) and speculators
(`transformer_layer_config`, layer ids counted from the embedding).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from dspark_jax.checkpoint.hf_decoder import (
    MODEL_TYPES,
    Architecture,
    decoder_config,
    text_config,
)
from dspark_jax.checkpoint.hf_fields import (
    Json,
    merged_field,
    one_of,
    refuse,
    required,
    required_int,
)
from dspark_jax.config import DecoderConfig
from dspark_jax.config_draft import DraftConfig
from dspark_jax.errors import CheckpointError

DRAFT_ARCHITECTURES: dict[str, Architecture] = {
    "Qwen3DSparkModel": "qwen3",
    "Gemma4DSparkModel": "gemma4",
    "DFlashDraftModel": "qwen3",
}
SPECULATORS = ("dspark", "dflash")
# Stands for the target's depth where the publisher does not state it; checking
# the pair replaces it with the target's.
UNSTATED_LAYERS = 2**31 - 1

CONFIDENCE_NAME = "confidence_head.proj.weight"
EMBED_NAME = "embed_tokens.weight"
HEAD_NAME = "lm_head.weight"


def is_draft(data: Json) -> bool:
    """Whether a `config.json` describes a draft."""
    names = data.get("architectures") or [""]
    return "speculators_model_type" in data or names[0] in DRAFT_ARCHITECTURES


def draft_config(data: Json, names: Collection[str] = ()) -> DraftConfig:
    """The config of a draft.

    Args:
      data: the parsed `config.json`.
      names: tensors in the files, without a `model.` prefix; they tell which
        tables are the draft's own.

    Raises:
      CheckpointError: fields that are missing, contradict each other or are not
        supported, by name.
    """
    if "speculators_model_type" in data:
        fields = _speculators(data)
    else:
        fields = _deepspec(data)
    reduced = fields.draft_vocab
    own_head = HEAD_NAME in names
    if reduced is not None and names and not own_head:
        raise CheckpointError(
            f"the draft has a vocabulary of its own ({reduced} ids) but no {HEAD_NAME}"
        )
    try:
        return DraftConfig(
            backbone=fields.backbone,
            block_size=required_int({"block_size": fields.block_size}, "block_size"),
            target_layer_ids=fields.layer_ids,
            num_target_layers=fields.num_target_layers,
            mask_token_id=required(
                {"mask_token_id": merged_field(data, "mask_token_id")}, "mask_token_id"
            ),
            sample_from_anchor=fields.from_anchor,
            draft_vocab_size=reduced,
            own_embed=EMBED_NAME in names,
            own_head=own_head,
            **_heads(data, names, fields.default_rank),
        )
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Where the layouts differ."""

    backbone: DecoderConfig
    block_size: int
    layer_ids: tuple[int, ...]
    num_target_layers: int
    from_anchor: bool
    default_rank: int
    draft_vocab: int | None = None


def _deepspec(data: Json) -> _Fields:
    name = one_of("architectures[0]", data["architectures"][0], DRAFT_ARCHITECTURES)
    backbone = decoder_config(text_config(data), DRAFT_ARCHITECTURES[name])
    layer_ids = merged_field(data, "target_layer_ids")
    return _Fields(
        backbone=dataclasses.replace(backbone, tie_embeddings=False),
        block_size=merged_field(data, "block_size"),
        layer_ids=tuple(required({"target_layer_ids": layer_ids}, "target_layer_ids")),
        num_target_layers=merged_field(data, "num_target_layers", UNSTATED_LAYERS),
        from_anchor=bool(
            merged_field(data, "sample_from_anchor", name != "DFlashDraftModel")
        ),
        default_rank=0,
    )


def _speculators(data: Json) -> _Fields:
    kind = one_of("speculators_model_type", data["speculators_model_type"], SPECULATORS)
    refuse(data, "enable_correction_head")
    inner = required(data, "transformer_layer_config")
    model_type = one_of(
        "transformer_layer_config.model_type", inner.get("model_type"), MODEL_TYPES
    )
    # The layers are Qwen3's also for a Llama target: they have q and k norms.
    architecture: Architecture = "gemma4" if "gemma4" in model_type else "qwen3"
    backbone = decoder_config(inner, architecture)
    raw_ids = required(data, "aux_hidden_state_layer_ids")
    reduced = data.get("draft_vocab_size")
    layers = data.get("num_target_layers", inner.get("num_target_layers"))
    return _Fields(
        backbone=dataclasses.replace(backbone, tie_embeddings=False),
        block_size=merged_field(data, "block_size"),
        # Counted in the tuple of hidden states, whose entry 0 is the embedding.
        layer_ids=tuple(layer - 1 for layer in raw_ids),
        num_target_layers=UNSTATED_LAYERS if layers is None else layers,
        from_anchor=bool(merged_field(data, "sample_from_anchor", kind == "dspark")),
        default_rank=256 if kind == "dspark" else 0,
        draft_vocab=None if reduced == backbone.vocab_size else reduced,
    )


def _heads(data: Json, names: Collection[str], default_rank: int) -> dict:
    rank = merged_field(data, "markov_rank", default_rank)
    head = merged_field(data, "markov_head_type", "vanilla") if rank else "none"
    one_of("markov_head_type", head, ("none", "vanilla", "gated", "rnn"))
    confidence = merged_field(data, "enable_confidence_head", CONFIDENCE_NAME in names)
    with_markov = merged_field(data, "confidence_head_with_markov", bool(rank))
    if confidence and with_markov and not rank:
        raise CheckpointError(
            "config.json: `confidence_head_with_markov` is true, but `markov_rank` is "
            "0: there is no Markov embedding to read"
        )
    return {
        "markov_rank": rank,
        "markov_head": head,
        "confidence": bool(confidence),
        "confidence_with_markov": bool(confidence and with_markov),
    }
