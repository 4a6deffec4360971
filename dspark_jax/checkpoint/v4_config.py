"""Settings of DeepSeek-V4 models, from either spelling of their `config.json`.

The authors' inference code and the published Hugging Face config name the same numbers
differently; files written by the `transformers` class spell layer kinds out. How many
stages a draft has is counted in the checkpoint: `num_nextn_predict_layers` says 1 where
three are stored.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dspark_jax.checkpoint.hf_decoder import eos_ids
from dspark_jax.checkpoint.hf_fields import (
    Json,
    one_of,
    refuse,
    required,
    required_int,
    value_or,
)
from dspark_jax.config import RopeConfig
from dspark_jax.config_draft import DraftConfig
from dspark_jax.config_v4 import V4Config
from dspark_jax.errors import CheckpointError

ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL_TYPE = "deepseek_v4"

# Field here -> (published name, the authors' name).
_SIZES: Mapping[str, tuple[str, str]] = {
    "vocab_size": ("vocab_size", "vocab_size"),
    "hidden_size": ("hidden_size", "dim"),
    "num_heads": ("num_attention_heads", "n_heads"),
    "head_dim": ("head_dim", "head_dim"),
    "rope_dim": ("qk_rope_head_dim", "rope_head_dim"),
    "q_rank": ("q_lora_rank", "q_lora_rank"),
    "o_groups": ("o_groups", "o_groups"),
    "o_rank": ("o_lora_rank", "o_lora_rank"),
    "window": ("sliding_window", "window_size"),
    "index_heads": ("index_n_heads", "index_n_heads"),
    "index_dim": ("index_head_dim", "index_head_dim"),
    "index_topk": ("index_topk", "index_topk"),
    "num_experts": ("n_routed_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "n_activated_experts"),
    "moe_dim": ("moe_intermediate_size", "moe_inter_dim"),
    "streams": ("hc_mult", "hc_mult"),
    "sinkhorn_iterations": ("hc_sinkhorn_iters", "hc_sinkhorn_iters"),
}
_NUMBERS: Mapping[str, tuple[str, str]] = {
    "route_scale": ("routed_scaling_factor", "route_scale"),
    "swiglu_limit": ("swiglu_limit", "swiglu_limit"),
    "rms_norm_eps": ("rms_norm_eps", "norm_eps"),
    "hc_eps": ("hc_eps", "hc_eps"),
}
_KINDS = {
    "sliding_attention": None,
    "compressed_sparse_attention": "compressed_sparse_attention",
    "heavily_compressed_attention": "heavily_compressed_attention",
}
STAGE = re.compile(r"^mtp\.(\d+)\.")


def is_v4(data: Json) -> bool:
    """Whether a `config.json` is of a DeepSeek-V4 model."""
    named = ARCHITECTURE in (data.get("architectures") or [])
    return named or data.get("model_type") == MODEL_TYPE or _is_native(data)


def v4_config(data: Json) -> V4Config:
    """The target's settings, weights as plain floats.

    Raises:
      CheckpointError: a field that is missing, odd or not supported.
    """
    native = _is_native(data)

    def name(pair: tuple[str, str]) -> str:
        return pair[native]

    fields: dict[str, Any] = {
        field: required_int(data, name(pair)) for field, pair in _SIZES.items()
    }
    for field, pair in _NUMBERS.items():
        fields[field] = float(required(data, name(pair)))
    one_of("scoring_func", value_or(data, _scoring(native), "sqrtsoftplus"),
           ["sqrtsoftplus"])  # fmt: skip
    shared = "n_shared_experts"
    one_of(shared, value_or(data, shared, 1), [1])
    if not native:
        heads = "num_key_value_heads"
        one_of(heads, value_or(data, heads, 1), [1])
        one_of("norm_topk_prob", value_or(data, "norm_topk_prob", True), [True])
        one_of("topk_method", value_or(data, "topk_method", "noaux_tc"), ["noaux_tc"])
        for field in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            refuse(data, field)
    layers = required_int(data, "n_layers" if native else "num_hidden_layers")
    ratios = _ratios(data)
    if len(ratios) < layers:
        raise CheckpointError(
            f"config.json: `compress_ratios` has {len(ratios)} entries for {layers} "
            "layers"
        )
    plain, stretched = _ropes(data, native)
    longest = value_or(data, "max_seq_len" if native else "max_position_embeddings", 0)
    try:
        return V4Config(
            compress_ratios=ratios[:layers],
            num_hash_layers=_hash_layers(data, native, layers),
            rope=plain,
            compress_rope=stretched,
            max_position=int(longest) or V4Config.max_position,
            eos_ids=eos_ids(data) or (),
            **fields,
        )
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def stage_count(data: Json, names: Iterable[str] = ()) -> int:
    """Stages of the draft: as many as are stored; without files, as ratios tell."""
    stored = {int(found[1]) for found in map(STAGE.match, names) if found}
    if stored:
        return max(stored) + 1
    layers = value_or(data, "num_hidden_layers", value_or(data, "n_layers", 0))
    return max(0, len(data.get("compress_ratios") or ()) - int(layers))


def v4_draft_config(
    data: Json, target: V4Config, names: Iterable[str] = ()
) -> DraftConfig | None:
    """The draft's settings; None where the checkpoint has no stages.

    Args:
      data: the parsed `config.json`.
      target: what `v4_config` gave.
      names: tensors in the files, by the authors' names.

    Raises:
      CheckpointError: a field that is missing.
    """
    stages = stage_count(data, names)
    if not stages:
        return None
    layers = dataclasses.replace(
        target, compress_ratios=(0,) * stages, num_hash_layers=0
    )
    try:
        return DraftConfig(
            backbone=layers,
            block_size=required_int(data, "dspark_block_size"),
            target_layer_ids=tuple(required(data, "dspark_target_layer_ids")),
            num_target_layers=target.num_layers,
            mask_token_id=int(required(data, "dspark_noise_token_id")),
            markov_rank=required_int(data, "dspark_markov_rank"),
            markov_head="vanilla",
            confidence=True,
            confidence_with_markov=True,
        )
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def _is_native(data: Json) -> bool:
    return "dim" in data and "compress_ratios" in data and "model_type" not in data


def _scoring(native: bool) -> str:
    return "score_func" if native else "scoring_func"


def _ratios(data: Json) -> tuple[int, ...]:
    found = data.get("compress_ratios")
    if found:
        return tuple(int(r) for r in found)
    kinds, rates = data.get("layer_types"), data.get("compress_rates") or {}
    if not kinds:
        raise CheckpointError(
            "config.json has neither `compress_ratios` nor `layer_types`; which layers "
            "are compressed cannot be guessed, as models of one size differ in it"
        )
    for kind in kinds:
        one_of("layer_types", kind, _KINDS)
    return tuple(int(required(rates, k)) if _KINDS[k] else 0 for k in kinds)


def _hash_layers(data: Json, native: bool, layers: int) -> int:
    kinds = data.get("mlp_layer_types")
    if kinds:
        count = list(kinds).count("hash_moe")
        if list(kinds[:count]) != ["hash_moe"] * count or len(kinds) != layers:
            raise CheckpointError(
                f"config.json: `mlp_layer_types` is {list(kinds)}; supported: "
                "hash_moe layers first, one entry a layer"
            )
        return count
    return int(required(data, "n_hash_layers" if native else "num_hash_layers"))


def _ropes(data: Json, native: bool) -> tuple[RopeConfig, RopeConfig]:
    """The plain rotary embedding, and that of compressed layers."""
    by_kind = data.get("rope_parameters") or {}
    if "compress" in by_kind:
        found, base = by_kind["compress"], required(by_kind["main"], "rope_theta")
        theta = required(found, "rope_theta")
    else:
        found = data if native else data.get("rope_scaling") or {}
        base, theta = (
            required(data, "rope_theta"),
            required(data, "compress_rope_theta"),
        )
    if not native:
        kind = value_or(found, "rope_type", value_or(found, "type", "default"))
        one_of("rope_scaling.type", kind, ["yarn"])
    names = ("rope_factor", "original_seq_len") if native else (
        "factor", "original_max_position_embeddings"
    )  # fmt: skip
    stretched = RopeConfig(
        theta=float(theta),
        kind="yarn",
        factor=float(required(found, names[0])),
        original_max_position=required_int(found, names[1]),
        beta_fast=float(value_or(found, "beta_fast", 32)),
        beta_slow=float(value_or(found, "beta_slow", 1)),
        # Scores are not stretched in these models.
        attention_factor=1.0,
    )
    return RopeConfig(theta=float(base)), stretched
