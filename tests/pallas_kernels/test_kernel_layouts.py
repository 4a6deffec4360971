"""Kernels on layouts and rows drawn at random: the reference's bits, always."""

import importlib.metadata
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

if tuple(map(int, importlib.metadata.version("jax").split(".")[:3])) < (0, 11, 2):
    pytest.skip("the kernels need jax >= 0.11.2", allow_module_level=True)

from pallas_kernels.mosaic_gpu import TILE, Tuning
from tests.pallas_kernels.interpreted import check

BF16, F32 = jnp.bfloat16, jnp.float32
TEMPERATURES = (0.0, 1e-5, 0.01, 0.5, 1.0, 30.0)


class Layout(NamedTuple):
    rows: int
    vocab: int
    splits: int
    load_bytes: int
    dtype: type
    total: int
    seed: int


def random_layout(seed: int) -> Layout:
    """Widths around the ends of tiles, blocks with many tiles and with none."""
    rng = np.random.default_rng(seed)
    near = int(rng.integers(1, 5)) * TILE + int(rng.integers(-1, 2))
    vocab = [near, int(rng.integers(2, 6000)), 128 * int(rng.integers(1, 40))]
    return Layout(
        rows=int(rng.integers(1, 9)),
        vocab=vocab[seed % 3],
        splits=int(rng.choice([1, 2, 3, 5, 16, 128])),
        load_bytes=int(rng.choice([4, 8, 16])),
        dtype=(BF16, F32)[seed % 2],
        total=int(rng.choice([pk.TOTAL, 2**29, 1 << 10, 50, 1])),
        seed=seed,
    )


def random_row(rng: np.random.Generator, width: int) -> np.ndarray:
    """One row of a kind that may go wrong."""
    row = rng.normal(size=width) * rng.choice([0.01, 1.0, 5.0, 100.0])
    kind = rng.integers(10)
    if kind == 0:  # Ties, many of them at the top.
        row = np.minimum(np.round(row), 0.0)
    elif kind == 1:
        row[rng.random(width) < rng.choice([0.3, 0.9, 0.999])] = -np.inf
    elif kind == 2:  # The largest numbers of both signs.
        row = np.where(row > 0, 3e38, -3e38)
    elif kind == 3:
        row = row * 1e30
    elif kind == 4:
        row[:] = rng.choice([0.0, -0.0, -7.5, 1e-40])
    elif kind == 5:  # One token left, at an end or anywhere.
        row[:] = -np.inf
        row[rng.choice([0, width - 1, rng.integers(width)])] = 1.0
    elif kind == 6:
        row[rng.integers(width)] = rng.choice([np.nan, -np.nan, np.inf])
    elif kind == 7:
        row[:] = -np.inf
    return row


def arguments(case: Layout) -> tuple[jax.Array, ...]:
    """Arguments of `verify_logits`: drafts drawn, chosen, missing and wrong."""
    rng = np.random.default_rng((case.seed, 1))
    shape, total = (case.rows, case.vocab), case.total
    target = np.stack([random_row(rng, case.vocab) for _ in range(case.rows)])
    usable = np.where(np.isfinite(target), target, 0.0).clip(-50, 50)
    draft = usable + rng.normal(size=shape)
    warm = np.exp(draft - draft.max(1, keepdims=True))
    q = np.stack([rng.multinomial(total, w / w.sum()) for w in warm])
    # Some drafts are a choice: all of their row is one token.
    for r in np.flatnonzero(rng.random(case.rows) < 0.3):
        q[r] = 0
        q[r, rng.choice([0, case.vocab - 1, rng.integers(case.vocab)])] = total
    point = rng.integers(0, total, case.rows)
    ids = (q.cumsum(1) > point[:, None]).argmax(1)
    offsets = point - (q.cumsum(1) - q)[np.arange(case.rows), ids]
    odd = rng.integers(8, size=case.rows)
    ids, offsets = np.where(odd == 0, -1, ids), np.where(odd == 1, total - 1, offsets)
    points = rng.choice([0, total - 1, rng.integers(total)], case.rows)
    source = rng.permutation(case.rows + 1)[: case.rows]
    pool = np.zeros((case.rows + 1, case.vocab), np.int64)
    pool[source] = q
    scale = pk.scale_of(rng.choice(TEMPERATURES, case.rows))
    ints = [jnp.asarray(x, jnp.int32) for x in (pool, source, ids, offsets)]
    verify = jnp.asarray(rng.random(case.rows) < 0.8)
    return (
        jnp.asarray(target, case.dtype), jnp.asarray(scale), *ints, verify,
        jnp.asarray(points, jnp.int32),
    )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        Layout(8, 1025, 2, 16, BF16, pk.TOTAL, 1),
        pytest.param(Layout(8, 2047, 3, 8, F32, 50, 2), marks=pytest.mark.slow),
        pytest.param(Layout(6, 7, 1, 4, F32, pk.TOTAL, 3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_verification_on_odd_rows(case):
    tuning = Tuning(case.splits, case.load_bytes)
    check("verify", arguments(case), tuning, case.total)


def test_sampling_on_odd_rows():
    case = Layout(8, 2049, 2, 4, BF16, pk.TOTAL, 4)
    check("sample", arguments(case), Tuning(case.splits, case.load_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(36))
def test_any_layout_has_the_bits_of_the_reference(seed):
    case = random_layout(seed)
    args, tuning = arguments(case), Tuning(case.splits, case.load_bytes)
    check("verify", args, tuning, case.total)
    if seed % 3 == 0:
        check("sample", args, tuning, case.total)


def test_the_draws_reach_every_kind_of_layout():
    cases = [random_layout(seed) for seed in range(36)]
    assert {case.vocab % TILE for case in cases} >= {0, 1, TILE - 1}
    assert min(case.vocab for case in cases) < TILE < max(c.vocab for c in cases)
    for field, values in (("splits", 6), ("load_bytes", 3), ("total", 5), ("rows", 7)):
        assert len({getattr(case, field) for case in cases}) >= values, field
    assert any(case.splits > -(-case.vocab // TILE) for case in cases)
