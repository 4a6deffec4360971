"""What every tensor file format offers: names, shapes, dtypes and reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from dspark_jax.errors import CheckpointError

# Stored types of weights that are read as they are.
FLOATS = ("float32", "bfloat16", "float16", "float64")
# Bytes of a tensor held beside its destination while it is read and cast.
PIECE_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Shape (row-major, as numpy has it) and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor at its dtype."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Tensors(Protocol):
    """A checkpoint's tensors by published name; nothing is read before asked."""

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        """All tensors."""
        ...

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Reads `name` into the contiguous `out`, cast to its dtype."""
        ...


def read(tensors: Tensors, name: str, dtype: np.dtype | None = None) -> np.ndarray:
    """A tensor as a fresh array, in its stored dtype unless told otherwise."""
    info = tensors.info[name]
    out = np.empty(info.shape, dtype or info.dtype)
    tensors.read_into(name, out)
    return out


def pieces(count: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """[start, stop) ranges of `count` items, each of bounded size."""
    step = max(1, PIECE_BYTES // max(1, itemsize))
    for start in range(0, count, step):
        yield start, min(count, start + step)


def cast_into(name: str, values: np.ndarray, out: np.ndarray) -> None:
    """Writes `values` to `out` of the same shape, rounded to nearest even.

    Raises:
      CheckpointError: a finite value has no finite value in `out`'s dtype.
    """
    with np.errstate(over="ignore"):
        out[...] = values.astype(out.dtype)
    narrow = out.dtype == np.float16 and values.dtype != np.float16
    if narrow and not np.array_equal(np.isfinite(out), np.isfinite(values)):
        raise CheckpointError(
            f"tensor {name} has values beyond float16; convert to bfloat16 or float32"
        )
