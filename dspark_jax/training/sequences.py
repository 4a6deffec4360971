"""Training text: token sequences that a target wrote, and the files they lie in.

A file is an `.npz` with

    tokens       [N, S] integers, right-padded with zeros
    role         uint8[N, S], who wrote each token: FORCED, QUESTION, ANSWER, PADDING
    temperature  [N] floats, of the answers
    prompt       int32[N], index of the prompt that began the sequence, -1 where the
                 model invented the question; a file may leave it out

A folder holds such files as shards `part-00000.npz`, `part-00001.npz`, ...
"""

from __future__ import annotations

import dataclasses
import functools
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dspark_jax.files import staged

# A template or a given question; a question and an answer that the model wrote.
FORCED, QUESTION, ANSWER = range(3)
PADDING = 255
SHARD = re.compile(r"part-(\d{5,})\.npz")


@dataclasses.dataclass(frozen=True)
class Sequences:
    """N sequences of S positions.

    Attributes:
      tokens: int32[N, S]. Ids, 0 at padding.
      role: uint8[N, S]. Who wrote each token; padding is on the right only.
      temperature: float32[N]. Of the answers; questions are drawn at 1.
      prompt: int32[N]. Index of the prompt, -1 for an invented question; None
        where it is not known.
    """

    tokens: np.ndarray
    role: np.ndarray
    temperature: np.ndarray
    prompt: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """int32[N]. Tokens before the padding."""
        return np.sum(self.role != PADDING, axis=1, dtype=np.int32)

    @functools.cached_property
    def written(self) -> np.ndarray:
        """bool[N, S]. Tokens that the model wrote, questions included."""
        return (self.role == QUESTION) | (self.role == ANSWER)


def loss_mask(text: Sequences) -> np.ndarray:
    """bool[N, S]. Tokens that a draft learns to guess: the model's answers."""
    return text.role == ANSWER


def join(parts: Sequence[Sequences]) -> Sequences:
    """One after the other.

    Raises:
      ValueError: nothing to join, or sequences of different lengths.
    """
    if not parts:
        raise ValueError("`parts` is empty; give at least one")
    widths = sorted({part.tokens.shape[1] for part in parts})
    if len(widths) > 1:
        raise ValueError(
            f"sequences of {widths[0]} and {widths[-1]} positions cannot be joined; "
            "give text of one length"
        )
    prompts = [part.prompt for part in parts]
    known = [one for one in prompts if one is not None]
    return Sequences(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.role for part in parts]),
        np.concatenate([part.temperature for part in parts]),
        np.concatenate(known) if len(known) == len(parts) else None,
    )


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard of a folder lies."""
    return folder / f"part-{number:05d}.npz"


def read_sequences(path: str | Path) -> Sequences:
    """Reads a file, or all shards of a folder in the order of their names.

    Raises:
      ValueError: nothing is there, or a file is not in the format; names it.
    """
    path = Path(path)
    if not path.is_dir():
        return _read_file(path)
    shards = sorted(
        (int(match[1]), file)
        for file in path.iterdir()
        if (match := SHARD.fullmatch(file.name))
    )
    if not shards:
        raise ValueError(f"{path} holds no shards; wanted: part-00000.npz, ...")
    missing = sorted(set(range(shards[-1][0])) - {number for number, _ in shards})
    if missing:
        raise ValueError(f"{shard_path(path, missing[0])} is missing between others")
    parts = [_read_file(file) for _, file in shards]
    for part, (_, file) in zip(parts, shards, strict=True):
        width, first = part.tokens.shape[1], parts[0].tokens.shape[1]
        if width != first:
            raise ValueError(
                f"{file}: sequences have {width} positions; those of {shards[0][1]} "
                f"have {first}"
            )
    return join(parts)


def write_sequences(path: str | Path, text: Sequences) -> None:
    """Writes one file, whole or not at all.

    Raises:
      ValueError: `text` is not in the format.
    """
    path = Path(path)
    _check(text, str(path))
    small = text.tokens.size == 0 or text.tokens.max() < 2**16
    arrays = {
        "tokens": text.tokens.astype(np.uint16 if small else np.int32),
        "role": text.role,
        "temperature": text.temperature,
    }
    if text.prompt is not None:
        arrays["prompt"] = text.prompt
    with staged(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)


def _read_file(path: Path) -> Sequences:
    try:
        with path.open("rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise ValueError("it is no archive")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read as .npz: {error}") from error
    absent = {"tokens", "role", "temperature"} - set(arrays)
    if absent:
        raise ValueError(
            f"{path} has no {', '.join(sorted(absent))}; it has "
            f"{', '.join(sorted(arrays)) or 'nothing'}"
        )
    tokens, heat = arrays["tokens"], arrays["temperature"]
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"{path}: `tokens` is {tokens.dtype}; it must be integers")
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**31:
        raise ValueError(
            f"{path}: `tokens` holds {tokens.min()}..{tokens.max()}; allowed: ids "
            "0..2**31-1"
        )
    if heat.dtype.kind != "f":
        raise ValueError(f"{path}: `temperature` is {heat.dtype}; it must be floats")
    prompt = arrays.get("prompt")
    if prompt is not None and prompt.dtype.kind != "i":
        raise ValueError(f"{path}: `prompt` is {prompt.dtype}; it must be integers")
    text = Sequences(
        tokens.astype(np.int32),
        arrays["role"],
        heat.astype(np.float32),
        None if prompt is None else prompt.astype(np.int32),
    )
    _check(text, str(path))
    return text


def _check(text: Sequences, name: str) -> None:
    """Raises ValueError, naming the file, unless `text` is as the module says."""
    tokens, role = text.tokens, text.role
    if tokens.ndim != 2:
        raise ValueError(f"{name}: `tokens` is {list(tokens.shape)}; must be [N, S]")
    wanted = [
        ("tokens", tokens, np.int32, tokens.shape),
        ("role", role, np.uint8, tokens.shape),
        ("temperature", text.temperature, np.float32, tokens.shape[:1]),
    ]
    if text.prompt is not None:
        wanted.append(("prompt", text.prompt, np.int32, tokens.shape[:1]))
    for field, found, dtype, shape in wanted:
        if found.shape != shape or found.dtype != dtype:
            raise ValueError(
                f"{name}: `{field}` is {found.dtype}{list(found.shape)}; it must be "
                f"{np.dtype(dtype)}{list(shape)}"
            )
    if tokens.size and tokens.min() < 0:
        raise ValueError(f"{name}: `tokens` holds {tokens.min()}; ids are >= 0")
    roles = set(np.unique(role).tolist()) - {FORCED, QUESTION, ANSWER, PADDING}
    if roles:
        raise ValueError(
            f"{name}: `role` holds {min(roles)}; allowed: {FORCED} forced, {QUESTION} "
            f"question, {ANSWER} answer, {PADDING} padding"
        )
    heat = text.temperature
    good = np.isfinite(heat) & (heat >= 0)
    if not good.all():
        raise ValueError(
            f"{name}: `temperature` holds {heat[~good][0]}; allowed: finite, >= 0"
        )
    padded = role == PADDING
    if (padded[:, :-1] & ~padded[:, 1:]).any():
        row = int((padded[:, :-1] & ~padded[:, 1:]).any(axis=1).argmax())
        raise ValueError(
            f"{name}: sequence {row} has tokens behind padding; padding (role "
            f"{PADDING}) is on the right only"
        )
