"""Rotary embedding settings of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark_jax.config import RopeConfig
from dspark_jax.errors import CheckpointError
from dspark_jax.models.layers import rope_frequencies

# Every key that may stand under `<architecture>.rope.`.
KNOWN = ("freq_base", "dimension_count")
SCALING = ("type", "factor", "original_context_length")


def gguf_rope(
    fields: Mapping[str, Any],
    architecture: str,
    head_dim: int,
    max_position: int,
    factors: np.ndarray | None,
) -> RopeConfig:
    """The rotary embedding that the metadata and the factor table describe.

    Args:
      fields: metadata of the file.
      architecture: the prefix of its keys.
      head_dim: d.
      max_position: the context length.
      factors: float32[d / 2] divisors of the frequencies (`rope_freqs.weight`),
        written for Llama 3 scaling, or None.

    Raises:
      CheckpointError: scaling that is not supported, by key.
    """
    prefix = f"{architecture}.rope."
    given = {
        key.removeprefix(prefix): value
        for key, value in fields.items()
        if key.startswith(prefix)
    }
    known = {*KNOWN, *(f"scaling.{name}" for name in SCALING)}
    for key, value in given.items():
        if key not in known:
            raise CheckpointError(
                f"GGUF key {prefix}{key} = {value!r} is not supported"
            )
    width = int(given.get("dimension_count", head_dim))
    if width != head_dim:
        raise CheckpointError(
            f"GGUF key {prefix}dimension_count is {width} with heads of {head_dim}: "
            "partly rotated heads are not supported"
        )
    theta = float(str(np.float32(given.get("freq_base", 10_000.0))))
    kind = given.get("scaling.type", "none")
    factor = float(given.get("scaling.factor", 1.0))
    original = int(given.get("scaling.original_context_length", 0))
    if factors is not None:
        if kind != "none":
            raise CheckpointError(
                f"GGUF file has rope_freqs.weight beside {prefix}scaling.type {kind!r}"
            )
        return _llama3(factors, theta, head_dim, original)
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=original or max_position,
        )
    raise CheckpointError(
        f"GGUF key {prefix}scaling.type is {kind!r}; supported: none, linear, yarn"
    )


def _llama3(
    factors: np.ndarray, theta: float, head_dim: int, original: int
) -> RopeConfig:
    """The settings that reproduce a table: the file stores only the result."""
    largest = float(factors.max())
    plain, _ = rope_frequencies(RopeConfig(theta=theta), head_dim)
    if largest == 1.0 and float(factors.min()) == 1.0:
        return RopeConfig(theta=theta)
    for length in (original, 8192, 4096, 16384, 32768):
        if length <= 0:
            continue
        rope = RopeConfig(
            theta=theta,
            kind="llama3",
            factor=max(1.0, largest),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=length,
        )
        table = plain / rope_frequencies(rope, head_dim)[0]
        if table.shape == factors.shape and np.allclose(table, factors, rtol=1e-4):
            return rope
    raise CheckpointError(
        "GGUF tensor rope_freqs.weight does not follow Llama 3 scaling (low and high "
        "frequency factors 1 and 4); other tables are not supported"
    )
