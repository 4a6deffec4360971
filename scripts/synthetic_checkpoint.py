"""Synthetic sharded checkpoints in published layouts, written tensor by tensor.

`dense` is a Llama, `v4` a DeepSeek-V4 at its published dimensions with fewer layers,
stages or experts. Values are cheap random bytes that are finite in every type.
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np

from dspark_jax.checkpoint.names import declared_shapes
from dspark_jax.checkpoint.safetensors_source import DTYPES, INDEX
from dspark_jax.checkpoint.v4_config import v4_config, v4_draft_config
from dspark_jax.checkpoint.v4_names import native_draft_names, native_names

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 8192,
    "vocab_size": 65536,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
FLASH = Path(__file__).parents[1] / "tests/data/deepseek_v4/flash_0731.json"
SHARD_BYTES = 512 * 2**20
POOL_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file; `dtype` as the format spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self):
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def dense(gigabytes):
    """(config, tensors) of a Llama: layers are added until the size is reached."""
    layers = 1
    while 2 * sum(math.prod(s) for _, s in _dense_shapes(layers)) < gigabytes * 1e9:
        layers += 1
    tensors = [Tensor(name, "BF16", shape) for name, shape in _dense_shapes(layers)]
    return {**DENSE, "num_hidden_layers": layers}, tensors


def _dense_shapes(layers):
    h, v = DENSE["hidden_size"], DENSE["vocab_size"]
    inner = DENSE["intermediate_size"]
    kv = h // DENSE["num_attention_heads"] * DENSE["num_key_value_heads"]
    yield "model.embed_tokens.weight", (v, h)
    for i in range(layers):
        base = f"model.layers.{i}"
        yield f"{base}.input_layernorm.weight", (h,)
        yield f"{base}.self_attn.q_proj.weight", (h, h)
        yield f"{base}.self_attn.k_proj.weight", (kv, h)
        yield f"{base}.self_attn.v_proj.weight", (kv, h)
        yield f"{base}.self_attn.o_proj.weight", (h, h)
        yield f"{base}.post_attention_layernorm.weight", (h,)
        yield f"{base}.mlp.gate_proj.weight", (inner, h)
        yield f"{base}.mlp.up_proj.weight", (inner, h)
        yield f"{base}.mlp.down_proj.weight", (h, inner)
    yield "model.norm.weight", (h,)
    yield "lm_head.weight", (v, h)


def v4_settings(layers=None, stages=3, experts=None):
    """`config.json` of a DeepSeek-V4; None keeps the published number."""
    data = json.loads(FLASH.read_text())
    layers = layers or data["num_hidden_layers"]
    return data | {
        "num_hidden_layers": layers,
        "compress_ratios": data["compress_ratios"][:layers] + [0] * stages,
        "num_hash_layers": min(layers, data["num_hash_layers"]),
        "n_routed_experts": experts or data["n_routed_experts"],
        "dspark_target_layer_ids": list(range(max(0, layers - 3), layers)),
    }


def v4_parts(data, weights="fp8_fp4", dtype="bfloat16"):
    """Settings of the target and, where there are stages, of the draft."""
    target = v4_config(data)
    target = dataclasses.replace(target, weights=weights, dtype=dtype)
    draft = v4_draft_config(data, target)
    return [target] if draft is None else [target, draft]


def v4(data, fused=False):
    """Tensors of a DeepSeek-V4 under the authors' names, the draft's along.

    Args:
      data: the settings.
      fused: plain bfloat16, and `w1` and `w3` of all experts of a layer of the
        target in one tensor, as the `transformers` class stores them.
    """
    experts = data["n_routed_experts"]
    stages = len(data["compress_ratios"]) - data["num_hidden_layers"]
    parts = v4_parts(data, "float" if fused else "fp8_fp4")
    for part, config in enumerate(parts):
        for path, leaf in declared_shapes(config).items():
            names = (
                native_draft_names(path, experts, stages)
                if part
                else native_names(path, experts)
            )
            dtype = _published(path, np.dtype(leaf.dtype))
            if "experts" not in path:
                yield Tensor(names[0], dtype, leaf.shape)
            elif fused and part == 0:
                yield from _fused(path, dtype, leaf.shape)
            else:
                yield from (Tensor(name, dtype, leaf.shape[1:]) for name in names)


def _published(path, dtype):
    if path[-1] == "tid2eid":
        return "I64"
    if dtype == np.uint8:
        if path[-1] == "scale":
            return "F8_E8M0"
        return "I8" if "experts" in path else "F8_E4M3"
    return {"bfloat16": "BF16", "float32": "F32"}[dtype.name]


def _fused(path, dtype, shape):
    base = f"model.layers.{path[1]}.mlp.experts"
    count, rows, columns = shape
    if "w1" in path:
        yield Tensor(f"{base}.gate_up_proj", dtype, (count, 2 * rows, columns))
    if "w2" in path:
        yield Tensor(f"{base}.down_proj", dtype, shape)


def write(folder, config, tensors, hollow=False):
    """Writes the files of a checkpoint.

    Args:
      folder: there already.
      config: becomes `config.json`.
      tensors: in the order of the files.
      hollow: headers only, data is a hole in the file: takes no space on disk.
    """
    shards, used = [[]], 0
    for tensor in tensors:
        if used and used + tensor.nbytes > SHARD_BYTES:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    pools = {} if hollow else _pools()
    weight_map = {}
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        weight_map |= {tensor.name: file for tensor in shard}
        _write_shard(folder / file, shard, pools)
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / INDEX).write_text(text)
    (folder / "config.json").write_text(json.dumps(config))


def _pools():
    rng = np.random.default_rng(0)
    # Below 64, a byte is finite in 8 bits and an exponent's first half is small.
    plain = rng.integers(0, 64, POOL_BYTES, np.uint8)
    ids = rng.integers(0, 6, POOL_BYTES // 8, np.int64)
    powers = rng.integers(118, 128, POOL_BYTES, np.uint8)
    return {"": plain.tobytes(), "I64": ids.tobytes(), "F8_E8M0": powers.tobytes()}


def _write_shard(path, shard, pools):
    header, end = {}, 0
    for tensor in shard:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        if not pools:
            handle.truncate(8 + len(text) + end)
            return
        for index, tensor in enumerate(shard):
            pool = pools.get(tensor.dtype, pools[""])
            # Tensors differ in where they begin in the pool.
            begin, left = 4096 * (index % 1024), tensor.nbytes
            while left:
                left -= handle.write(pool[begin : begin + left])
                begin = 0
