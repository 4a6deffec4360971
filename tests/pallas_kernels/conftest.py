"""Helpers shared by the tests of the acceptance and sampling operations."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest


@pytest.fixture(scope="session")
def vocab_mesh() -> jax.sharding.Mesh:
    """Four devices, over which a vocabulary is split."""
    return jax.make_mesh(
        (4,),
        ("vocab",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:4],
    )


@pytest.fixture(scope="session")
def golden():
    """`golden("transforms")`: a reference file of the verification rules."""
    folder = Path(__file__).parent.parent / "data" / "verification"

    def load(name: str) -> Any:
        return json.loads((folder / f"{name}.json").read_text())

    return load


@pytest.fixture(scope="session")
def measured_law():
    """Exact law of an operation that draws tokens in ascending id order.

    Every token owns an interval of the 2^24 points; its ends are found by bisection
    over the word, so that only the public operation is asked.
    """

    def law(tokens_of_words, rows: int, width: int) -> np.ndarray:
        """`tokens_of_words`: uint32[rows, width] -> int32[rows, width]."""
        token = np.arange(width)[None, :]
        low = np.zeros((rows, width), np.int64)
        high = np.full((rows, width), 2**24, np.int64)
        for _ in range(25):  # 2^24 + 1 possible ends
            middle = (low + high) // 2
            words = (np.minimum(middle, 2**24 - 1) << 8).astype(np.uint32)
            below = np.asarray(tokens_of_words(words)) <= token
            # The first point whose token lies above `token` ends its share.
            low = np.where(below & (low < high), middle + 1, low)
            high = np.where(below, high, np.minimum(high, middle))
        assert np.all(low == high)
        return np.diff(high, axis=1, prepend=0) / 2**24

    return law


@pytest.fixture(scope="session")
def grid_words():
    """Words of the midpoints of `count` equal parts of [0, 1)."""

    def words(count: int) -> np.ndarray:
        return ((2 * np.arange(count) + 1) * 2**31 // count).astype(np.uint32)

    return words


@pytest.fixture(scope="session")
def random_words():
    """Uniform words, reproducible."""

    def words(seed: int, *shape: int) -> jax.Array:
        return jax.random.bits(jax.random.key(seed), shape, np.uint32)

    return words


@pytest.fixture(scope="session")
def seed_words():
    """64-bit seeds as words, low word first."""

    def words(seeds) -> jax.Array:
        pairs = [[int(s) & 0xFFFFFFFF, int(s) >> 32] for s in seeds]
        return jax.numpy.asarray(pairs, np.uint32)

    return words
