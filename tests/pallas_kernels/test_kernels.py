"""GPU kernels in interpret mode: the reference's bits, whatever the layout.

Interpret mode finds reads outside of an array, and races between blocks that have
done equally much; that blocks never share a tile is tested by itself.
"""

import functools
import importlib.metadata
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import implementation
from pallas_kernels.implementation import why_no_kernels
from pallas_kernels.integer_rows import points

if tuple(map(int, importlib.metadata.version("jax").split(".")[:3])) < (0, 11, 2):
    pytest.skip("the kernels need jax >= 0.11.2", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu as gpu
from pallas_kernels.sample import pallas_mosaic_gpu as sample_kernels
from tests.pallas_kernels.interpreted import check


def arguments(rows, vocab, dtype=jnp.float32, seed=0, total=pk.TOTAL):
    """A step in which every kind of row occurs, if there are enough rows."""
    rng = np.random.default_rng(seed)
    target = rng.normal(size=(rows, vocab)) * 3
    draft = target + rng.normal(size=(rows, vocab))
    scale = pk.scale_of(rng.choice([0.0, 0.02, 0.5, 1.0], rows))
    if rows > 4:
        target[0] = -np.inf
        target[0, vocab // 2] = 1  # One token left.
        target[1, vocab - 1] = np.nan  # No law.
        target[2] = 0  # Flat, all tied.
        target[4] = -np.inf  # No law either.
        scale[2] = 1e6
    scale, draft = jnp.asarray(scale), jnp.asarray(draft, jnp.float32)
    rows_of = functools.partial(pk.integer_rows, total=total)
    to_points = functools.partial(points, total=total)
    drafted = jax.jit(rows_of)(draft, scale)
    words = rng.integers(0, 2**32, (2, rows), np.uint64).astype(np.uint32)
    ids, offsets = jax.jit(pk.draw)(drafted, to_points(jnp.asarray(words[0])))
    if rows > 3:
        # Nothing drafted, and a draft that was not drawn.
        ids = ids.at[-1].set(-1)
        offsets = offsets.at[-2].set(total - 1)
    # Drafts are kept in an order of their own, among rows that nobody asks for.
    source = rng.permutation(rows + 2)[:rows].astype(np.int32)
    pool = np.zeros((rows + 2, vocab), np.int32)
    pool[source] = drafted
    return (
        jnp.asarray(target, dtype), scale, jnp.asarray(pool), jnp.asarray(source), ids,
        offsets, jnp.arange(rows) % 4 != 3, to_points(jnp.asarray(words[1])),
    )  # fmt: skip


BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.mark.parametrize(
    ("vocab", "rows", "splits", "dtype"),
    [
        (128, 64, 1, F32),
        # Padded rows are among those of test_kernel_layouts, too.
        pytest.param(1000, 6, 2, BF16, marks=pytest.mark.slow),
        (5000, 7, 5, BF16),
        (32768, 1, 16, F32),
        (50257, 1, 3, BF16),
        (151936, 1, 7, BF16),
    ],
)
def test_verification_has_the_bits_of_the_reference(vocab, rows, splits, dtype):
    args = arguments(rows, vocab, dtype, seed=vocab + rows)
    check("verify", args, gpu.Tuning(splits))


@pytest.mark.parametrize(
    ("vocab", "rows", "splits", "dtype"), [(1000, 6, 1, F32), (5000, 7, 4, BF16)]
)
def test_sampling_has_the_bits_of_the_reference(vocab, rows, splits, dtype):
    args = arguments(rows, vocab, dtype, seed=vocab + rows)
    check("sample", args, gpu.Tuning(splits))


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [128, 1000, 5000, 32768, 50257, 151936])
@pytest.mark.parametrize("rows", [1, 6, 7, 64])
def test_all_sizes_have_the_bits_of_the_reference(vocab, rows):
    splits = range(1, 17) if (vocab, rows) == (5000, 6) else (1, 5, 16)
    for count, dtype in zip(splits, itertools.cycle((BF16, F32)), strict=False):
        args = arguments(rows, vocab, dtype, seed=count)
        check("verify", args, gpu.Tuning(count, load_bytes=16 if count % 2 else 8))
        if count == 5:
            check("sample", args, gpu.Tuning(count))


@pytest.mark.parametrize("vocab", [100, 3000])
def test_argmax_is_the_lowest_id_of_the_maximum(vocab):
    logits = np.random.default_rng(0).integers(-3, 3, (5, vocab)).astype(np.float32)
    logits[1], logits[2, 7], logits[3] = -np.inf, np.nan, np.inf
    got = sample_kernels.argmax_ids(
        jnp.asarray(logits),
        tuning=gpu.Tuning(3),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    best = [logits[0].argmax(), -1, -1, -1, logits[4].argmax()]
    np.testing.assert_array_equal(got, best)
    np.testing.assert_array_equal(got, pk.argmax_ids(jnp.asarray(logits)))


def test_every_tile_belongs_to_one_block():
    """And the last two to the same one, as they overlap."""
    for width, splits in itertools.product(
        (1024, 1025, 2048, 5000, 50257, 151936, 2**20 - 1), (1, 2, 3, 16, 128)
    ):
        first, last = gpu.deal(np.arange(splits), width, splits)
        taken = [t for a, b in zip(first, last, strict=True) for t in range(a, b)]
        assert taken == list(range(gpu.tiles(width)))
        if gpu.tiles(width) > 1:
            owner = [
                [t in range(a, b) for a, b in zip(first, last, strict=True)]
                for t in (gpu.tiles(width) - 2, gpu.tiles(width) - 1)
            ]
            assert owner[0] == owner[1]


def one_behind(weights, ids, point, right=gpu.first_over):
    return right(weights, ids, point + 1)


def last_tile_left_out(split, width, splits, right=gpu.deal):
    first, last = right(split, width, splits)
    return first, jnp.minimum(last, gpu.tiles(width) - 1)


def no_tail_mask(index, width, how, right=gpu.tile_at):
    tile = right(index, width, how)
    return tile._replace(own=tile.ids >= 0)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("first_over", one_behind),
        ("tile_at", no_tail_mask),
        pytest.param("deal", last_tile_left_out, marks=pytest.mark.slow),
    ],
)
def test_wrong_kernels_are_seen(name, wrong, monkeypatch):
    # Few units, so that a unit too far is another token.
    args = arguments(24, 1300, seed=3, total=50)
    monkeypatch.setattr(gpu, name, wrong)
    with pytest.raises(AssertionError, match="token|accept"):
        check("verify", args, gpu.Tuning(1), total=50)


def test_kernels_by_name_say_why_they_cannot_run():
    assert "default device is a cpu" in (why_no_kernels() or "")
    args = arguments(2, 128)
    with pytest.raises(ValueError, match="'pallas' cannot run here: the default"):
        pk.verify_logits(*args, implementation="pallas")
    with pytest.raises(ValueError, match="allowed: None, 'reference', 'pallas'"):
        pk.sample_logits(args[0], args[1], args[-1], implementation="triton")
    got = pk.verify_logits(*args, implementation="reference")
    np.testing.assert_array_equal(got.token, pk.verify_logits(*args).token)


def test_a_machine_with_a_gpu_may_compile_for_its_cpu(monkeypatch):
    """None leaves the choice to the lowering; a name does not."""
    args = arguments(3, 128)
    expected = pk.verify_logits(*args)
    monkeypatch.setattr(implementation, "why_no_kernels", lambda: None)
    got = jax.jit(pk.verify_logits)(*args)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    by_name = jax.jit(functools.partial(pk.verify_logits, implementation="pallas"))
    with pytest.raises(Exception, match="(?i)interpret|lower|platform|cpu"):
        by_name(*args)
