"""A DeepSeek-V4 checkpoint's tensors under the authors' names, raw or expanded.

Files written by the `transformers` class have names of their own, and hold `w1` and
`w3` of all experts in one tensor. Published files hold 8-bit floats with a scale a
block and 4-bit floats with a scale for 32 inputs (`models.deepseek_v4.weights`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from dspark_jax.checkpoint.block_scales import BLOCK, dequantise_blocks
from dspark_jax.checkpoint.safetensors_source import SafetensorsFolder
from dspark_jax.checkpoint.tensors import TensorInfo, cast_into, read
from dspark_jax.errors import CheckpointError
from dspark_jax.models.deepseek_v4.weights import GROUP

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
RAW = np.dtype(np.uint8)
# Values of 4-bit codes 0..15.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])

# Within a layer, published name -> the authors' one; longer prefixes come first.
_HF_LAYER = (
    ("self_attn.compressor.indexer.scorer.weights_proj", "attn.indexer.weights_proj"),
    ("self_attn.compressor.indexer.q_b_proj", "attn.indexer.wq_b"),
    ("self_attn.compressor.indexer.kv_proj", "attn.indexer.compressor.wkv"),
    ("self_attn.compressor.indexer.gate_proj", "attn.indexer.compressor.wgate"),
    ("self_attn.compressor.indexer.position_bias", "attn.indexer.compressor.ape"),
    ("self_attn.compressor.indexer.kv_norm", "attn.indexer.compressor.norm"),
    ("self_attn.compressor.kv_proj", "attn.compressor.wkv"),
    ("self_attn.compressor.gate_proj", "attn.compressor.wgate"),
    ("self_attn.compressor.position_bias", "attn.compressor.ape"),
    ("self_attn.compressor.kv_norm", "attn.compressor.norm"),
    ("self_attn.q_a_proj", "attn.wq_a"),
    ("self_attn.q_a_norm", "attn.q_norm"),
    ("self_attn.q_b_proj", "attn.wq_b"),
    ("self_attn.kv_proj", "attn.wkv"),
    ("self_attn.kv_norm", "attn.kv_norm"),
    ("self_attn.sinks", "attn.attn_sink"),
    ("self_attn.o_a_proj", "attn.wo_a"),
    ("self_attn.o_b_proj", "attn.wo_b"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
    ("mlp.gate", "ffn.gate"),
    ("mlp.experts.gate_up_proj", "ffn.experts.gate_up"),
    ("mlp.experts.down_proj", "ffn.experts.w2"),
    ("mlp.shared_experts.gate_proj", "ffn.shared_experts.w1"),
    ("mlp.shared_experts.up_proj", "ffn.shared_experts.w3"),
    ("mlp.shared_experts.down_proj", "ffn.shared_experts.w2"),
)
_HF_TOP = {
    "model.embed_tokens.weight": "embed.weight",
    "lm_head.weight": "head.weight",
    "model.norm.weight": "norm.weight",
    **{f"model.hc_head.hc_{x}": f"hc_head_{x}" for x in ("fn", "base", "scale")},
}
_HF_NAME = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_MIXTURE = re.compile(r"^(attn|ffn)_hc\.(fn|base|scale)$")


def authors_name(name: str) -> str:
    """The authors' name of a tensor; names that are theirs already stay."""
    if name in _HF_TOP:
        return _HF_TOP[name]
    found = _HF_NAME.match(name)
    if not found:
        return name.removeprefix("model.")
    layer, rest = found.groups()
    mixture = _MIXTURE.match(rest)
    if mixture:
        return f"layers.{layer}.hc_{mixture[1]}_{mixture[2]}"
    for theirs, authors in _HF_LAYER:
        if rest == theirs or rest.startswith(f"{theirs}."):
            return f"layers.{layer}.{authors}{rest[len(theirs) :]}"
    return name.removeprefix("model.")


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a tensor is read from; `half` of a tensor's second axis, or all of it."""

    stored: str
    half: int | None = None


class V4Tensors:
    """Tensors by the authors' names; bytes of short floats as uint8.

    Args:
      inner: the files.
      expand: short floats appear as bfloat16 instead, their scales disappear.

    Raises:
      CheckpointError: two tensors of one name, or scales that do not fit.
    """

    def __init__(self, inner: SafetensorsFolder, expand: bool = False):
        self._inner, self._expand = inner, expand
        self._entries: dict[str, _Entry] = {}
        self._info: dict[str, TensorInfo] = {}
        for stored, info in inner.info.items():
            name = authors_name(stored)
            if name.endswith("experts.gate_up"):
                self._split(name.removesuffix("gate_up"), stored, info)
            else:
                self._add(name, _Entry(stored), info)
        self.quantised = any(
            info.dtype == FP8 or self._is_fp4(name)
            for name, info in self._raw_info().items()
        )
        if expand:
            self._check_scales()
        self._info = {
            name: TensorInfo(self._shape(name), self._dtype(name))
            for name in self._entries
            if not (expand and self._is_scale(name))
        }

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        """All tensors."""
        return self._info

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Reads `name` into the contiguous `out`, cast to its dtype."""
        entry = self._entries[name]
        stored = self._inner.info[entry.stored]
        if self._expand and self._is_short(name):
            cast_into(name, self._expanded(name), out)
        elif entry.half is not None:
            # A half of an expert's rows is one span of the file.
            size = stored.shape[1] // 2 * stored.shape[2]
            for expert in range(stored.shape[0]):
                first = (2 * expert + entry.half) * size
                self._inner.read_span_into(entry.stored, first, out[expert])
        elif self._info[name].dtype == RAW and stored.dtype != RAW:
            if stored.dtype == np.float32:
                out[...] = _exponent_bytes(name, read(self._inner, entry.stored))
            else:
                self._inner.read_into(entry.stored, out.view(stored.dtype))
        else:
            self._inner.read_into(entry.stored, out)

    def _add(self, name: str, entry: _Entry, info: TensorInfo) -> None:
        if name in self._entries:
            other = self._entries[name].stored
            raise CheckpointError(f"{other} and {entry.stored} are the same parameter")
        self._entries[name] = entry
        self._info[name] = info

    def _split(self, prefix: str, stored: str, info: TensorInfo) -> None:
        if len(info.shape) != 3 or info.shape[1] % 2:
            raise CheckpointError(
                f"{stored} has shape {info.shape}; expected [experts, 2 * inner, "
                "hidden], gate and up of each expert"
            )
        count, rows, columns = info.shape
        half = TensorInfo((count, rows // 2, columns), info.dtype)
        for index, name in enumerate(("w1", "w3")):
            self._add(f"{prefix}{name}", _Entry(stored, index), half)

    def _raw_info(self) -> dict[str, TensorInfo]:
        return {n: self._inner.info[e.stored] for n, e in self._entries.items()}

    def _stored(self, name: str) -> TensorInfo:
        return self._inner.info[self._entries[name].stored]

    def _is_scale(self, name: str) -> bool:
        weight = f"{name.removesuffix('.scale')}.weight"
        return name.endswith(".scale") and weight in self._entries

    def _is_fp4(self, name: str) -> bool:
        return ".experts." in name and self._stored(name).dtype in (np.int8, RAW)

    def _is_short(self, name: str) -> bool:
        weight = name.endswith(".weight")
        return weight and (self._stored(name).dtype == FP8 or self._is_fp4(name))

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self._info[name].shape
        if self._expand and self._is_short(name) and self._is_fp4(name):
            return (*shape[:-1], 2 * shape[-1])
        return shape

    def _dtype(self, name: str) -> np.dtype:
        stored = self._stored(name).dtype
        if self._is_short(name):
            return np.dtype(ml_dtypes.bfloat16) if self._expand else RAW
        return RAW if self._is_scale(name) else stored

    def _check_scales(self) -> None:
        for name in [n for n in self._entries if self._is_short(n)]:
            scale = f"{name.removesuffix('.weight')}.scale"
            shape = self._stored(name).shape
            if len(shape) != 2:
                raise CheckpointError(f"{name} has shape {shape}; expected a matrix")
            rows, columns = shape
            fp4 = self._is_fp4(name)
            want = (rows, -(-2 * columns // GROUP)) if fp4 else (
                -(-rows // BLOCK[0]), -(-columns // BLOCK[1])
            )  # fmt: skip
            have = self._stored(scale).shape if scale in self._entries else None
            if have != want:
                raise CheckpointError(
                    f"{name} needs scales {scale} of shape {want}, found {have}"
                )

    def _expanded(self, name: str) -> np.ndarray:
        scale = read(self._inner, self._entries[_scale_of(name)].stored)
        weight = read(self._inner, self._entries[name].stored)
        factors = scale.astype(np.float32) if scale.dtype != RAW else powers(scale)
        if self._is_fp4(name):
            return decode_fp4(weight.view(np.uint8), factors)
        return dequantise_blocks(weight, factors, BLOCK)


def powers(scale: np.ndarray) -> np.ndarray:
    """2^(byte - 127) of uint8 bytes, float32; 255 is NaN."""
    return scale.view(E8M0).astype(np.float32)


def decode_fp4(codes: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """float32[out, in] of uint8[out, in / 2], low half first, and [out, in / 32]."""
    values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1)
    values = values.reshape(codes.shape[0], -1)
    return values * np.repeat(factors, GROUP, axis=1)[:, : values.shape[1]]


def _scale_of(name: str) -> str:
    return f"{name.removesuffix('.weight')}.scale"


def _exponent_bytes(name: str, scale: np.ndarray) -> np.ndarray:
    """Scales stored as float32, as bytes of their exponents."""
    found = scale.astype(E8M0)
    if not np.array_equal(found.astype(np.float32), scale):
        raise CheckpointError(
            f"{name} has scales that are no powers of two, which 8-bit weights here "
            "need; give a `dtype` to expand them"
        )
    return found.view(np.uint8)
