"""8-bit float weights with one scale a block, as full-precision tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.checkpoint.tensors import TensorInfo, Tensors, cast_into, read
from dspark_jax.errors import CheckpointError

logger = logging.getLogger(__name__)

FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
SCALE_SUFFIX = "_scale_inv"
BLOCK = (128, 128)
# Formats that pack several weights into one integer.
PACKED = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
ID_MAPS = ("d2t", "t2d")


def dequantise_blocks(
    weight: np.ndarray, scales: np.ndarray, block: tuple[int, int] = BLOCK
) -> np.ndarray:
    """Multiplies each block of a matrix by its scale.

    Args:
      weight: float8[out, in].
      scales: float32 or bfloat16[ceil(out / block[0]), ceil(in / block[1])].
      block: rows and columns that share a scale; the last ones may be ragged.

    Returns:
      float32[out, in].

    Raises:
      ValueError: the scales do not cover the weight.
    """
    rows, columns = weight.shape
    want = (-(-rows // block[0]), -(-columns // block[1]))
    if scales.shape != want:
        raise ValueError(
            f"scales have shape {scales.shape}; a weight of shape {weight.shape} in "
            f"blocks of {block} needs {want}"
        )
    values = weight.astype(np.float32)
    factors = scales.astype(np.float32)
    for i in range(want[0]):
        band = values[i * block[0] : (i + 1) * block[0]]
        band *= np.repeat(factors[i], block[1])[:columns][None]
    return values


class DequantisedTensors:
    """Tensors whose 8-bit weights appear as bfloat16; scales disappear."""

    def __init__(self, inner: Tensors, block: tuple[int, int] = BLOCK):
        self._inner = inner
        self._block = block
        self._info: dict[str, TensorInfo] = {}
        for name, info in inner.info.items():
            if self._is_scale(name):
                continue
            if info.dtype in FLOAT8:
                self._check(name, info)
                info = TensorInfo(info.shape, np.dtype(ml_dtypes.bfloat16))
            self._info[name] = info

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        """All tensors but the scales."""
        return self._info

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Reads `name` into the contiguous `out`, dequantised and cast."""
        if self._inner.info[name].dtype not in FLOAT8:
            self._inner.read_into(name, out)
            return
        weight = read(self._inner, name)
        scales = read(self._inner, name + SCALE_SUFFIX)
        cast_into(name, dequantise_blocks(weight, scales, self._block), out)

    def _is_scale(self, name: str) -> bool:
        weight = self._inner.info.get(name.removesuffix(SCALE_SUFFIX))
        if weight is None or not name.endswith(SCALE_SUFFIX):
            return False
        return weight.dtype in FLOAT8

    def _check(self, name: str, info: TensorInfo) -> None:
        scale = self._inner.info.get(name + SCALE_SUFFIX)
        if scale is None or len(info.shape) != 2:
            raise CheckpointError(
                f"{name} is an 8-bit float tensor, but no matrix with scales "
                f"{name}{SCALE_SUFFIX}"
            )
        want = tuple(-(-n // b) for n, b in zip(info.shape, self._block, strict=True))
        if scale.shape != want:
            raise CheckpointError(
                f"{name}{SCALE_SUFFIX} has shape {scale.shape}; {name} "
                f"{info.shape} in blocks of {self._block} needs {want}"
            )


def full_precision(tensors: Tensors, settings: Mapping[str, Any] | None) -> Tensors:
    """The tensors, 8-bit floats decoded. What is stored decides.

    Args:
      tensors: the stored ones.
      settings: `quantization_config` of the model, or None.

    Raises:
      CheckpointError: a quantisation method that is not supported, by name.
    """
    info = tensors.info
    method = (settings or {}).get("quant_method", "unknown")
    if any(stored.dtype in FLOAT8 for stored in info.values()):
        if settings is not None and method != "fp8":
            raise CheckpointError(
                f"config.json: quantization method {method!r} is not supported; "
                "supported: 'fp8' with block scales"
            )
        rows, columns = (settings or {}).get("weight_block_size") or BLOCK
        return DequantisedTensors(tensors, (int(rows), int(columns)))
    if settings is None:
        return tensors
    odd = [
        name
        for name, stored in info.items()
        if name.endswith(SCALE_SUFFIX)
        or (stored.dtype.name in PACKED and name.split(".")[-1] not in ID_MAPS)
    ]
    if odd:
        raise CheckpointError(
            f"config.json: quantization method {method!r} with tensors such as "
            f"{odd[0]} is not supported"
        )
    logger.warning(
        "config.json names quantization method %r, but all weights are stored in full "
        "precision; they are read as they are",
        method,
    )
    return tensors
