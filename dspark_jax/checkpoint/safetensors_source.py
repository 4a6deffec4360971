"""Tensors of a folder in the safetensors format, one file or several shards.

Headers and the index are checked before any tensor is read. Reading goes
straight from the file into the destination: a memory map would count the pages
it touched as the process's memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.checkpoint.hf_config import read_json
from dspark_jax.checkpoint.tensors import TensorInfo, cast_into, pieces
from dspark_jax.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# A header beyond this is no header: the length is read from the file itself.
MAX_HEADER = 100 * 2**20

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True)
class _Place:
    file: Path
    offset: int


class SafetensorsFolder:
    """The tensors of a folder. Errors are `CheckpointError`."""

    def __init__(self, folder: Path):
        refuse_pickle(folder)
        self.folder = folder
        self.files = _shards(folder)
        self._info: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        for file in self.files:
            for name, (info, offset) in read_header(file).items():
                if name in self._info:
                    other = self._places[name].file.name
                    raise CheckpointError(f"{name} is in both {other} and {file.name}")
                self._info[name] = info
                self._places[name] = _Place(file, offset)
        self._check_index()

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        """All tensors."""
        return self._info

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Reads `name` into the contiguous `out`, cast to its dtype."""
        self.read_span_into(name, 0, out)

    def read_span_into(self, name: str, first: int, out: np.ndarray) -> None:
        """Reads `out.size` numbers of `name` from number `first` on, in row order.

        Args:
          name: of the tensor.
          first: place of the first number, 0 is the tensor's first.
          out: contiguous; what is read is cast to its dtype.
        """
        info, place = self._info[name], self._places[name]
        flat = out.reshape(-1)
        same = out.dtype == info.dtype
        with place.file.open("rb", buffering=0) as handle:
            handle.seek(place.offset + first * info.dtype.itemsize)
            for start, stop in pieces(flat.size, info.dtype.itemsize):
                piece = flat[start:stop]
                target = piece if same else np.empty(stop - start, info.dtype)
                _fill(handle, target, place.file, name)
                if not same:
                    cast_into(name, target, piece)

    def _check_index(self) -> None:
        path = self.folder / INDEX
        if not path.is_file():
            return
        listed = _weight_map(path)
        absent = [
            f"{name} ({file})"
            for name, file in listed.items()
            if name not in self._places or self._places[name].file.name != file
        ]
        unlisted = [
            f"{name} ({place.file.name})"
            for name, place in self._places.items()
            if name not in listed
        ]
        if absent or unlisted:
            raise CheckpointError(
                f"{INDEX} disagrees with the shards: "
                f"{len(absent)} listed tensors are not in their shard"
                f"{_some(absent)}, {len(unlisted)} stored tensors are not "
                f"listed{_some(unlisted)}"
            )


def refuse_pickle(path: Path) -> None:
    """CheckpointError when `path` is, or only holds, pickled weights.

    Reading a pickle can run code, so such files are never opened.
    """
    advice = "pickled weights can run code and are not read; use safetensors files"
    if path.suffix in PICKLES and path.is_file():
        raise CheckpointError(f"{path.name}: {advice}")
    if path.is_dir() and not any(path.glob("*.safetensors")):
        pickled = sorted(p.name for p in path.iterdir() if p.suffix in PICKLES)
        if pickled:
            raise CheckpointError(f"{path.name}/{pickled[0]}: {advice}")


def read_header(file: Path) -> dict[str, tuple[TensorInfo, int]]:
    """Tensors of one file with their position in it, checked against its size.

    Raises:
      CheckpointError: not a safetensors file, or one that is cut short: the file
        and the first tensor that does not fit.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{file.name} is cut short or no safetensors file: its header "
                    f"claims {length} bytes, the file has {size}"
                )
            header = json.loads(handle.read(length))
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        spans = {name: tuple(e["data_offsets"]) for name, e in entries.items()}
        shapes = {name: tuple(e["shape"]) for name, e in entries.items()}
        dtypes = {name: e["dtype"] for name, e in entries.items()}
    except CheckpointError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file.name} has no valid header: {error}") from error
    data, end = 8 + length, 0
    result: dict[str, tuple[TensorInfo, int]] = {}
    for name in sorted(spans, key=lambda n: spans[n]):
        start, stop = spans[name]
        if dtypes[name] not in DTYPES:
            raise CheckpointError(
                f"{file.name}: {name} has dtype {dtypes[name]}, which is not supported"
            )
        info = TensorInfo(shapes[name], DTYPES[dtypes[name]])
        if start != end or stop - start != info.nbytes:
            raise CheckpointError(
                f"{file.name}: {name} claims bytes {start}..{stop}, but "
                f"{dtypes[name]}{list(info.shape)} after byte {end} takes {info.nbytes}"
            )
        if data + stop > size:
            raise CheckpointError(
                f"{file.name} is cut short: {name} ends at byte {data + stop}, the "
                f"file at {size}; download it again"
            )
        result[name], end = (info, data + start), stop
    if data + end != size:
        raise CheckpointError(
            f"{file.name} has {size - data - end} bytes after its last tensor"
        )
    return result


def write_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes one file. The package of the format has no short floats for numpy."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, value in tensors.items():
        start, end = end, end + value.nbytes
        header[name] = {
            "dtype": names[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            handle.write(np.ascontiguousarray(value).tobytes())


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        for name in names:
            if Path(name).name != name or Path(name).suffix in PICKLES:
                raise CheckpointError(f"{INDEX} lists {name!r}, which is not read")
        gone = [name for name in names if not (folder / name).is_file()]
        if gone:
            raise CheckpointError(
                f"{INDEX} lists {len(gone)} files that are not in {folder.name}"
                f"{_some(gone)}"
            )
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise CheckpointError(
            f"{folder.name} has {len(found)} safetensors files but no {INDEX}"
        )
    raise CheckpointError(f"{folder.name} has no safetensors file")


def _weight_map(index: Path) -> dict[str, str]:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{INDEX} has no `weight_map`")
    return table


def _fill(handle, target: np.ndarray, file: Path, name: str) -> None:
    view = memoryview(target.view(np.uint8)) if target.size else memoryview(b"")
    done = 0
    while done < len(view):
        count = handle.readinto(view[done:])
        if not count:
            raise CheckpointError(f"{file.name} ended while {name} was read")
        done += count


def _some(names: list[str]) -> str:
    if not names:
        return ""
    return f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
