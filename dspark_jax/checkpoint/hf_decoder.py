"""A published `config.json` of a dense decoder as a `DecoderConfig`."""

from __future__ import annotations

from typing import Any, Literal

from dspark_jax.checkpoint.hf_fields import (
    Json,
    one_of,
    refuse,
    required,
    required_int,
    value_or,
)
from dspark_jax.checkpoint.hf_rope import rope_config
from dspark_jax.config import DTYPES, AttentionConfig, DecoderConfig, LayerKind
from dspark_jax.errors import CheckpointError

Architecture = Literal["llama", "qwen3", "gemma4"]

MODEL_TYPES: dict[str, Architecture] = {
    "llama": "llama",
    "qwen3": "qwen3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
}
TARGET_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
}
LAYER_KINDS: dict[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
}
# Off or absent in every supported checkpoint.
UNSUPPORTED = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "enable_moe_block",
    "hidden_size_per_layer_input",
    "num_kv_shared_layers",
    "use_double_wide_mlp",
    "attn_logit_softcapping",
    "attention_chunk_size",
)
GEMMA_THETA = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}


def text_config(data: Json) -> Json:
    """The language model's part of a config; a multimodal one nests it."""
    nested = data.get("text_config")
    if not isinstance(nested, dict):
        return data
    # Fields that some writers keep only outside.
    outer = ("tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id")
    return {**{key: data[key] for key in outer if key in data}, **nested}


def target_config(data: Json) -> DecoderConfig:
    """The config of a target.

    Args:
      data: the parsed `config.json`.

    Raises:
      CheckpointError: an unknown architecture, an unsupported feature or a field
        that is missing or out of range, by name.
    """
    names = data.get("architectures") or []
    if names:
        one_of("architectures[0]", names[0], TARGET_ARCHITECTURES)
        architecture = TARGET_ARCHITECTURES[names[0]]
    else:
        model_type = one_of("model_type", data.get("model_type"), MODEL_TYPES)
        architecture = MODEL_TYPES[model_type]
    return decoder_config(text_config(data), architecture)


def decoder_config(
    data: Json, architecture: Architecture, vocab_size: int | None = None
) -> DecoderConfig:
    """The config of a decoder whose architecture is already known.

    Args:
      data: the (text) config.
      architecture: how its layers are made.
      vocab_size: overrides the file's.
    """
    for field in UNSUPPORTED:
        refuse(data, field)
    # "vision" lets image tokens see each other; text stays causal.
    refuse(data, "use_bidirectional_attention", (None, False, "vision"))
    activation = "gelu_pytorch_tanh" if architecture == "gemma4" else "silu"
    for field in ("hidden_act", "hidden_activation"):
        if data.get(field) is not None:
            one_of(field, data[field], (activation,))
    types = layer_types(data, architecture)
    heads = required_int(data, "num_attention_heads")
    max_position = int(value_or(data, "max_position_embeddings", 2048))
    kinds: dict[str, AttentionConfig] = {}
    tied_by_default = architecture == "gemma4"
    softcap = data.get("final_logit_softcapping")
    try:
        for name in sorted(set(types)):
            kinds[LAYER_KINDS[name]] = _attention(
                data, architecture, name, types, heads, max_position
            )
        return DecoderConfig(
            architecture=architecture,
            vocab_size=vocab_size or required_int(data, "vocab_size"),
            hidden_size=required_int(data, "hidden_size"),
            intermediate_size=required_int(data, "intermediate_size"),
            num_heads=heads,
            layer_types=tuple(LAYER_KINDS[name] for name in types),
            full=kinds.get("full"),
            sliding=kinds.get("sliding"),
            rms_norm_eps=float(value_or(data, "rms_norm_eps", 1e-6)),
            tie_embeddings=bool(value_or(data, "tie_word_embeddings", tied_by_default)),
            attention_bias=bool(value_or(data, "attention_bias", False)),
            mlp_bias=bool(value_or(data, "mlp_bias", False)),
            logit_softcap=None if not softcap else float(softcap),
            max_position=max_position,
            eos_ids=eos_ids(data) or (),
            dtype=declared_dtype(data) or "float32",
        )
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {error}") from error


def layer_types(data: Json, architecture: Architecture) -> tuple[str, ...]:
    """Published layer type of every layer."""
    count = required_int(data, "num_hidden_layers")
    declared = data.get("layer_types")
    if declared is not None:
        if len(declared) != count:
            raise CheckpointError(
                f"config.json: `layer_types` has {len(declared)} entries for "
                f"`num_hidden_layers` {count}"
            )
        return tuple(one_of("layer_types", name, LAYER_KINDS) for name in declared)
    if architecture == "gemma4":
        raise CheckpointError("config.json has no `layer_types`, which Gemma4 needs")
    if architecture == "qwen3" and data.get("use_sliding_window"):
        first = required_int(data, "max_window_layers")
        return tuple(
            "sliding_attention" if layer >= first else "full_attention"
            for layer in range(count)
        )
    return ("full_attention",) * count


def eos_ids(data: Json) -> tuple[int, ...] | None:
    """End-of-text ids, or None when the file names none."""
    value = data.get("eos_token_id")
    if value is None:
        return None
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def declared_dtype(data: Json) -> str | None:
    """Parameter dtype that the file states, if it is one of ours."""
    name = str(data.get("dtype") or data.get("torch_dtype") or "")
    name = name.removeprefix("torch.")
    return name if name in DTYPES else None


def _attention(
    data: Json,
    architecture: Architecture,
    name: str,
    types: tuple[str, ...],
    heads: int,
    max_position: int,
) -> AttentionConfig:
    """Geometry of the layers of published type `name`."""
    hidden = required_int(data, "hidden_size")
    head_dim = data.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise CheckpointError(
                f"config.json: no `head_dim`, and `hidden_size` {hidden} is not a "
                f"multiple of `num_attention_heads` {heads}"
            )
        head_dim = hidden // heads
    kv_heads = value_or(data, "num_key_value_heads", heads)
    k_eq_v = False
    theta = 10_000.0
    if architecture == "gemma4":
        theta = GEMMA_THETA[name]
        if name == "full_attention":
            k_eq_v = bool(value_or(data, "attention_k_eq_v", False))
            head_dim = value_or(data, "global_head_dim", head_dim)
            if k_eq_v:
                kv_heads = value_or(data, "num_global_key_value_heads", kv_heads)
    override = _layer_override(data, name, types)
    head_dim = override.get("head_dim", head_dim)
    kv_heads = override.get("num_key_value_heads", kv_heads)
    window = None
    if name == "sliding_attention":
        window = int(required(data, "sliding_window"))
    return AttentionConfig(
        num_kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        rope=rope_config(data, name, theta, max_position),
        window=window,
        k_eq_v=k_eq_v,
    )


def _layer_override(data: Json, name: str, types: tuple[str, ...]) -> dict[str, Any]:
    """What `per_layer_config` says about all layers of one type.

    Newer writers fold the geometry of Gemma4's global layers into it, keyed by
    the layer's index.
    """
    table = data.get("per_layer_config") or {}
    by_layer = {int(key): dict(value or {}) for key, value in table.items()}
    geometry = ("head_dim", "num_key_value_heads")
    for layer, fields in by_layer.items():
        for field, value in fields.items():
            if field not in geometry and value != data.get(field):
                raise CheckpointError(
                    f"config.json: `per_layer_config` of layer {layer} sets "
                    f"`{field}` to {value!r}, which is not supported"
                )
    wanted = [
        {k: v for k, v in by_layer.get(layer, {}).items() if k in geometry and v}
        for layer, kind in enumerate(types)
        if kind == name
    ]
    if any(fields != wanted[0] for fields in wanted):
        raise CheckpointError(
            f"config.json: `per_layer_config` differs between the {name} layers, "
            "which is not supported"
        )
    return wanted[0] if wanted else {}
