"""A bounded store on disk for what a target says about training text.

A sequence's rows are written once and read back as they were, so that training from
the store and training from a recomputed pass see the same numbers.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.files import replace_text

Fields = Mapping[str, tuple[int, str]]
HEADER = "store.json"


class FeatureStore:
    """Rows of sequences by number, up to a size.

    Files are raw arrays `[rows, length, width]` that grow with the text; unwritten
    parts take no room. A sequence counts as stored when its mark, a checksum of its
    tokens, is there. Marks are written after the rows, so that what an interrupted
    run left is written again, and so is a sequence whose text has changed.
    """

    def __init__(
        self,
        folder: str | Path,
        key: Mapping[str, Any],
        tokens: np.ndarray,
        fields: Fields,
        limit: int | None = None,
    ):
        """Opens or makes a store.

        Args:
          folder: where it lies.
          key: what the rows depend on besides the tokens, ready for JSON.
          tokens: int[N, S]. The text.
          fields: width and dtype of a position's values, by name.
          limit: bytes on disk at most; later sequences are not stored.

        Raises:
          ValueError: the folder holds rows of something else.
        """
        self._folder = Path(folder)
        count, length = tokens.shape
        self._length = length
        per_sequence = length * sum(
            width * _dtype(name).itemsize for width, name in fields.values()
        )
        self.rows = count if limit is None else min(count, limit // per_sequence)
        self._check_header({**key, "length": length, "fields": _plain(fields)})
        self._files = {
            name: self._open(name, width, dtype)
            for name, (width, dtype) in fields.items()
        }
        self._wanted = marks(tokens[: self.rows])
        self._marks = self._map("marks.bin", np.dtype(np.uint32), (max(self.rows, 1),))

    def __len__(self) -> int:
        """Sequences that are stored."""
        return int((self._marks[: self.rows] == self._wanted).sum())

    def missing(self, sequences: np.ndarray) -> np.ndarray:
        """Those of `sequences` that could be stored and are not."""
        inside = sequences[sequences < self.rows]
        return inside[self._marks[inside] != self._wanted[inside]]

    def has(self, sequences: np.ndarray) -> bool:
        """Whether all of `sequences` are stored."""
        return bool((sequences < self.rows).all()) and not len(self.missing(sequences))

    def read(self, sequences: np.ndarray) -> dict[str, np.ndarray]:
        """Rows [n, length, width] of stored sequences."""
        return {name: np.array(file[sequences]) for name, file in self._files.items()}

    def write(self, sequences: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Stores the rows of sequences; those beyond the limit are dropped."""
        inside = sequences < self.rows
        if not inside.any():
            return
        for name, file in self._files.items():
            file[sequences[inside]] = values[name][inside]
            file.flush()
        self._marks[sequences[inside]] = self._wanted[sequences[inside]]
        self._marks.flush()

    def _check_header(self, wanted: dict[str, Any]) -> None:
        path = self._folder / HEADER
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found != wanted:
                other = sorted(k for k in wanted if found.get(k) != wanted[k])
                raise ValueError(
                    f"{self._folder} holds features of another run: "
                    f"{', '.join(other)} differ; give another folder or remove it"
                )
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(wanted, indent=2) + "\n")

    def _open(self, name: str, width: int, dtype: str) -> np.memmap:
        shape = (max(self.rows, 1), self._length, width)
        return self._map(f"{name}.bin", _dtype(dtype), shape)

    def _map(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.memmap:
        path = self._folder / name
        path.touch()
        size = int(np.prod(shape)) * dtype.itemsize
        if path.stat().st_size < size:
            os.truncate(path, size)
        return np.memmap(path, dtype=dtype, mode="r+", shape=shape)


def marks(tokens: np.ndarray) -> np.ndarray:
    """A checksum of each sequence that is never 0, uint32[N]."""
    rows = np.ascontiguousarray(tokens, np.int32)
    found = [zlib.crc32(memoryview(row.view(np.uint8))) or 1 for row in rows]
    return np.array(found, np.uint32)


def _dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def _plain(fields: Fields) -> dict[str, list[Any]]:
    return {name: list(value) for name, value in fields.items()}
