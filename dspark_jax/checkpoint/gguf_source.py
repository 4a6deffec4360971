"""Tensors, settings and metadata of a GGUF file (Llama architecture).

The `gguf` package parses the file and decodes its block formats; reading is
tensor by tensor, a bounded piece at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from dspark_jax.checkpoint.gguf_rope import gguf_rope
from dspark_jax.checkpoint.tensors import TensorInfo, cast_into, pieces
from dspark_jax.config import AttentionConfig, DecoderConfig
from dspark_jax.errors import CheckpointError

FREQUENCIES = "rope_freqs.weight"
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class _Stored:
    offset: int
    nbytes: int
    kind: Any
    # Heads whose rows are stored in the interleaved order; 0: none.
    heads: int


class GgufFile:
    """The tensors of a GGUF file. Errors are `CheckpointError`."""

    def __init__(self, path: Path):
        self.path = path
        reader = _open(path)
        self.metadata = _metadata(reader)
        self._info: dict[str, TensorInfo] = {}
        self._stored: dict[str, _Stored] = {}
        size = path.stat().st_size
        for tensor in reader.tensors:
            name, end = tensor.name, tensor.data_offset + tensor.n_bytes
            if end > size:
                raise CheckpointError(
                    f"{path.name} is cut short: {name} ends at byte {end}, the file "
                    f"at {size}"
                )
            shape = tuple(int(n) for n in reversed(tensor.shape))
            self._info[name] = TensorInfo(shape, _dtype(tensor.tensor_type))
            self._stored[name] = _Stored(
                int(tensor.data_offset),
                int(tensor.n_bytes),
                tensor.tensor_type,
                self._interleaved_heads(name),
            )
        self._check_types()

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        """All tensors; block formats appear as float32."""
        return self._info

    @property
    def quantised(self) -> bool:
        """Whether any tensor is in a block format."""
        return any(s.kind.name not in FLOATS for s in self._stored.values())

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Reads `name` into the contiguous `out`, decoded and cast.

        The rows of query and key projections come back in the half-split order
        that rotary embedding here expects.
        """
        stored, shape = self._stored[name], self._info[name].shape
        rows = shape[0] if len(shape) > 1 else 1
        row_bytes = stored.nbytes // rows
        whole = np.empty(shape, np.float32) if stored.heads else out
        flat = whole.reshape(rows, -1)
        with self.path.open("rb") as handle:
            handle.seek(stored.offset)
            for start, stop in pieces(rows, row_bytes):
                raw = np.frombuffer(handle.read((stop - start) * row_bytes), np.uint8)
                if raw.size != (stop - start) * row_bytes:
                    raise CheckpointError(f"{self.path.name} ended inside {name}")
                values = _decode(raw.reshape(stop - start, row_bytes), stored.kind)
                cast_into(name, values.reshape(stop - start, -1), flat[start:stop])
        if stored.heads:
            cast_into(name, half_split(whole, stored.heads), out)

    def _interleaved_heads(self, name: str) -> int:
        arch = self.metadata.get("general.architecture")
        heads = self.metadata.get(f"{arch}.attention.head_count", 0)
        if ".attn_q." in name:
            return int(heads)
        if ".attn_k." in name:
            return int(self.metadata.get(f"{arch}.attention.head_count_kv", heads))
        return 0

    def _check_types(self) -> None:
        kinds = {stored.kind for stored in self._stored.values()}
        for kind in sorted(kinds):
            block, nbytes = gguf.GGML_QUANT_SIZES[kind]
            try:
                _decode(np.zeros((1, nbytes), np.uint8), kind)
            except (KeyError, NotImplementedError, ValueError) as error:
                raise CheckpointError(
                    f"{self.path.name}: tensor type {kind.name} cannot be decoded"
                ) from error


def half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from pairs (0, 1), (2, 3), ... to halves.

    Args:
      weight: float[heads * d, ...].
      heads: how many heads its rows form.

    Returns:
      The same shape: even rows of each head, then odd rows.
    """
    d = weight.shape[0] // heads
    pairs = weight.reshape(heads, d // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def gguf_metadata(path: str | Path) -> dict[str, Any]:
    """All metadata of a GGUF file as plain Python values."""
    return _metadata(_open(Path(path)))


def gguf_config(file: GgufFile) -> DecoderConfig:
    """The settings in a file's metadata.

    Raises:
      CheckpointError: an architecture or feature that is not supported, by name.
    """
    fields = file.metadata
    name = fields.get("general.architecture")
    if name != "llama":
        raise CheckpointError(
            f"{file.path.name}: GGUF architecture {name!r} is not supported; "
            "supported: 'llama'"
        )
    for key in ("llama.expert_count", "split.count"):
        if fields.get(key, 0) > 1:
            raise CheckpointError(
                f"{file.path.name}: {key} is {fields[key]}, which is not supported"
            )

    def need(key: str) -> int:
        if f"llama.{key}" not in fields:
            raise CheckpointError(f"{file.path.name} has no key llama.{key}")
        return int(fields[f"llama.{key}"])

    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = int(fields.get("llama.attention.key_length", hidden // heads))
    if int(fields.get("llama.attention.value_length", head_dim)) != head_dim:
        raise CheckpointError(
            f"{file.path.name}: keys and values of different length are not supported"
        )
    max_position = need("context_length")
    table = file.info.get("token_embd.weight")
    if table is None:
        raise CheckpointError(f"{file.path.name} has no tensor token_embd.weight")
    eps = np.float32(fields.get("llama.attention.layer_norm_rms_epsilon", 1e-5))
    eos = fields.get("tokenizer.ggml.eos_token_id")
    try:
        attention = AttentionConfig(
            num_kv_heads=int(fields.get("llama.attention.head_count_kv", heads)),
            head_dim=head_dim,
            rope=gguf_rope(fields, "llama", head_dim, max_position, _factors(file)),
        )
        return DecoderConfig(
            architecture="llama",
            vocab_size=table.shape[0],
            hidden_size=hidden,
            intermediate_size=need("feed_forward_length"),
            num_heads=heads,
            layer_types=("full",) * need("block_count"),
            full=attention,
            # Shortest decimal of the stored float32, as in published configs.
            rms_norm_eps=float(str(eps)),
            tie_embeddings="output.weight" not in file.info,
            attention_bias="blk.0.attn_q.bias" in file.info,
            mlp_bias="blk.0.ffn_up.bias" in file.info,
            max_position=max_position,
            eos_ids=() if eos is None else (int(eos),),
            dtype="bfloat16" if file.quantised else str(table.dtype),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file.path.name}: {error}") from error


def _factors(file: GgufFile) -> np.ndarray | None:
    if FREQUENCIES not in file.info:
        return None
    out = np.empty(file.info[FREQUENCIES].shape, np.float32)
    file.read_into(FREQUENCIES, out)
    return out


def _open(path: Path) -> gguf.GGUFReader:
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file")
    try:
        reader = gguf.GGUFReader(path)
    except (IndexError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} is cut short or no GGUF file that can be read: {error}"
        ) from error
    if reader.byte_order != "I":
        raise CheckpointError(f"{path.name} is in the other byte order")
    return reader


def _metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }


def _dtype(kind: Any) -> np.dtype:
    if kind.name in ("I8", "I16", "I32", "I64"):
        return np.dtype(f"int{kind.name[1:]}")
    name = FLOATS.get(kind.name, "float32")
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _decode(raw: np.ndarray, kind: Any) -> np.ndarray:
    """uint8[rows, bytes] -> [rows, columns], plain formats in their own dtype."""
    if kind.name in FLOATS or kind.name.startswith("I") and kind.name[1:].isdigit():
        return raw.view(_dtype(kind))
    return gguf.dequantize(raw, kind)
