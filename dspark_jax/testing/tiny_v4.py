"""A small random DeepSeek-V4 checkpoint in the published layout and quantisation.

Everything is where a real one has it: the authors' tensor names, 8-bit floats with a
scale for each 128x128 block, 4-bit experts with a scale for 32 inputs, the draft's
stages in the same files. Its text is noise.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dspark_jax.checkpoint.names import Path as LeafPath
from dspark_jax.checkpoint.names import Shapes, declared_shapes
from dspark_jax.checkpoint.safetensors_source import SINGLE, write_tensors
from dspark_jax.checkpoint.v4_config import v4_config, v4_draft_config
from dspark_jax.checkpoint.v4_names import native_draft_names, native_names
from dspark_jax.checkpoint.v4_tensors import E2M1, E8M0, FP8
from dspark_jax.config_draft import DraftConfig
from dspark_jax.config_v4 import V4Config
from dspark_jax.errors import CheckpointError
from dspark_jax.models.deepseek_v4.weights import BLOCK, GROUP
from dspark_jax.testing.tiny import EOS_ID, VOCAB, byte_tokenizer

# The largest numbers of both formats.
FP4_MOST, FP8_MOST = 6.0, 448.0
STAGES = 3


def tiny_v4_json(**changes: Any) -> dict[str, Any]:
    """A published `config.json`: all kinds of layers, eight heads, groups, experts."""
    ratios = [0, 0, 4, 128, 4, 128]
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "num_hidden_layers": len(ratios),
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 128,
        "o_groups": 8,
        "o_lora_rank": 128,
        "sliding_window": 128,
        "compress_ratios": [*ratios, *[0] * STAGES],
        "index_n_heads": 8,
        "index_head_dim": 128,
        "index_topk": 64,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 1048576,
        "num_hash_layers": 2,
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 128,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [3, 4, 5],
        "dspark_markov_rank": 64,
        "dspark_noise_token_id": VOCAB - 1,
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
            "scale_fmt": "ue8m0",
        },
        "expert_dtype": "fp4",
        **changes,
    }


def write_tiny_v4(folder: str | Path, seed: int = 0, **changes: Any) -> Path:
    """Writes the checkpoint; the folder appears complete or not at all.

    Args:
      folder: absent.
      seed: of the weights.
      changes: fields of `tiny_v4_json` to change.

    Returns:
      The folder.

    Raises:
      CheckpointError: the folder is there already, or settings that do not fit.
    """
    folder = Path(folder)
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; give another folder")
    data = tiny_v4_json(**changes)
    target = v4_config(data)
    draft = v4_draft_config(data, target)
    rng = np.random.default_rng(seed)
    tensors = _tensors(target, rng)
    if draft is not None:
        tensors |= _tensors(draft, rng)
    made = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        text = json.dumps(data, indent=1) + "\n"
        (made / "config.json").write_text(text, encoding="utf-8")
        _write_tokenizer(made)
        write_tensors(made / SINGLE, tensors)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _write_tokenizer(folder: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {
        **tokenizer.special_tokens,
        "chat_template": tokenizer.chat_template,
    }
    text = json.dumps(settings, indent=1) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _tensors(
    config: V4Config | DraftConfig, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Random tensors by the authors' names, short floats where they have them."""
    is_draft = isinstance(config, DraftConfig)
    layers = config.backbone if isinstance(config, DraftConfig) else config
    assert isinstance(layers, V4Config)
    shapes: Shapes = declared_shapes(config)
    found: dict[str, np.ndarray] = {}
    for path, leaf in shapes.items():
        names = (
            native_draft_names(path, layers.num_experts, layers.num_layers)
            if is_draft
            else native_names(path, layers.num_experts)
        )
        stacked = "experts" in path
        for name in names:
            shape = leaf.shape[1:] if stacked else leaf.shape
            value = _random(path, jax.ShapeDtypeStruct(shape, leaf.dtype), layers, rng)
            found |= _stored(name, path, value)
    return found


def _random(
    path: LeafPath,
    leaf: jax.ShapeDtypeStruct,
    layers: V4Config,
    rng: np.random.Generator,
) -> np.ndarray:
    if path[-1] == "tid2eid":
        rows = [
            rng.permutation(layers.num_experts)[: leaf.shape[1]]
            for _ in range(leaf.shape[0])
        ]
        return np.stack(rows).astype(np.int64)
    normal = rng.standard_normal(leaf.shape).astype(np.float32)
    if any("norm" in part for part in path):
        return 1 + np.float32(0.1) * normal
    if len(leaf.shape) == 1:
        return np.float32(0.1) * normal
    normal *= np.float32(2.0 / np.sqrt(leaf.shape[-1]))
    # Blocks of different size, so that no two of them have to share a scale.
    rows, columns = (-(-n // BLOCK) for n in normal.shape)
    sizes = np.exp2(rng.integers(-1, 2, (rows, columns))).astype(np.float32)
    sizes = sizes.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)
    return normal * sizes[: normal.shape[0], : normal.shape[1]]


# Leaves that are published in float32, and modules in 8 bits.
_FULL = ("sink", "ape", "bias", "base", "fn", "scale")
_EIGHT = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "fc")


def _stored(name: str, path: LeafPath, value: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor as it is published, with its scales."""
    scale = f"{name.removesuffix('.weight')}.scale"
    if "experts" in path:
        codes, powers = to_fp4(value)
        return {name: codes.view(np.int8), scale: powers}
    own = path[len(path) - 2]
    if own in _EIGHT and not {"compressor", "markov"} & set(path):
        short, powers = to_fp8(value)
        return {name: short, scale: powers}
    if value.dtype == np.int64 or path[len(path) - 1] in _FULL:
        return {name: value}
    return {name: value.astype(ml_dtypes.bfloat16)}


def to_fp8(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32[out, in] as e4m3 and a power of two for each block of 128x128."""
    rows, columns = value.shape
    grid = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = np.zeros((grid[0] * BLOCK, grid[1] * BLOCK), np.float32)
    padded[:rows, :columns] = value
    blocks = padded.reshape(grid[0], BLOCK, grid[1], BLOCK)
    powers = _power(np.abs(blocks).max(axis=(1, 3)), FP8_MOST)
    short = (blocks / powers[:, None, :, None]).reshape(padded.shape)
    return short[:rows, :columns].astype(FP8), powers.astype(E8M0)


def to_fp4(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32[out, in] as uint8[out, in / 2] and a power of two for 32 inputs."""
    groups = value.reshape(value.shape[0], -1, GROUP)
    powers = _power(np.abs(groups).max(axis=2), FP4_MOST)
    scaled = np.abs(groups / powers[..., None]).reshape(value.shape)
    codes = np.abs(scaled[..., None] - E2M1[:8]).argmin(axis=-1).astype(np.uint8)
    codes |= (value < 0).astype(np.uint8) << 3
    return codes[:, 0::2] | (codes[:, 1::2] << 4), powers.astype(E8M0)


def _power(top: np.ndarray, most: float) -> np.ndarray:
    """The least powers of two that bring `top` to `most` or below."""
    return np.exp2(np.ceil(np.log2(np.maximum(top, 1e-30) / most))).astype(np.float32)
