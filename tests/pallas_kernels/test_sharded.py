"""The vocabulary split over devices: same ids, same verdicts, no gathered row."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

SHARES = 4


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh(
        (SHARES,),
        ("vocab",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:SHARES],
    )


def step(target, draft, given, words, *, filters, axis_name=None):
    """Draft one token per row, verify it, and draw a fresh one; plus greedy."""
    verify = jnp.arange(target.shape[0], dtype=jnp.int32) % 4 != 3
    one, other = pk.points(words[0]), pk.points(words[1])
    if filters:
        row = partial(pk.filtered_rows, axis_name=axis_name)
        p, q = row(target, **given), row(draft, **given)
        drafts, offsets = pk.draw(q, one, axis_name=axis_name)
        rows = pk.verify_rows(p, q, drafts, offsets, verify, other, axis_name=axis_name)
    else:
        scale, order = given["scale"], jnp.arange(len(verify), dtype=jnp.int32)
        p = pk.integer_rows(target, scale, axis_name=axis_name)
        drafts, offsets, q = pk.sample_logits(draft, scale, one, axis_name=axis_name)
        rows = pk.verify_logits(
            target, scale, q, order, drafts, offsets, verify, other, axis_name=axis_name
        )
    greedy = pk.verify_greedy(target, drafts, verify, axis_name=axis_name)
    return p, q, (drafts, offsets, *rows, *greedy)


def split(mesh, filters):
    rows, whole = jax.P(None, "vocab"), jax.P()
    return jax.jit(
        jax.shard_map(
            partial(step, filters=filters, axis_name="vocab"),
            mesh=mesh,
            in_specs=(rows, rows, whole, whole),
            out_specs=(rows, rows, whole),
        )
    )


def inputs(rng, rows, width, temperature=1.0):
    target = np.round(rng.normal(size=(rows, width)) * 16) / 8
    draft = target + np.round(rng.normal(size=(rows, width)) * 8) / 8
    given = dict(
        scale=jnp.asarray(pk.scale_of(np.full(rows, temperature))),
        top_p=jnp.asarray(rng.uniform(0.2, 1.1, rows), jnp.float32),
        top_k=jnp.asarray(rng.integers(0, width + 3, rows), jnp.int32),
        min_p=jnp.asarray(rng.uniform(0, 0.1, rows), jnp.float32),
    )
    words = jnp.asarray(rng.integers(0, 2**32, (2, rows), dtype=np.uint32))
    as_float = partial(jnp.asarray, dtype=jnp.float32)
    return as_float(target), as_float(draft), given, words


@pytest.mark.parametrize("filters", [False, True])
def test_fr08_split_vocabulary_gives_the_same_tokens(mesh, filters, rng):
    sharded, single = split(mesh, filters), jax.jit(partial(step, filters=filters))
    # 200 steps of four rows, twenty steps at a time: rows are independent.
    for _ in range(10):
        args = inputs(rng, 80, 64)
        p, q, result = sharded(*args)
        p_one, q_one, expected = single(*args)
        np.testing.assert_array_equal(p, p_one)
        np.testing.assert_array_equal(q, q_one)
        for name, a, b in zip(NAMES, result, expected, strict=True):
            np.testing.assert_array_equal(a, b, name)
            # Every device holds the same answer.
            for shard in a.addressable_shards:
                np.testing.assert_array_equal(shard.data, np.asarray(a))


NAMES = (
    "drafts", "offsets", "accept", "token", "accept_prob", "g_accept", "g_token",
    "g_prob",
)  # fmt: skip


@pytest.mark.parametrize("width", [100, pytest.param(1204, marks=pytest.mark.slow)])
def test_fr35_split_rows_of_odd_width(mesh, width, rng):
    sharded, single = split(mesh, True), jax.jit(partial(step, filters=True))
    for temperature in (0.0, 1.0):
        target, draft, given, words = inputs(rng, 5, width, temperature)
        check_odd_rows(sharded, single, target, draft, given, words)


def check_odd_rows(sharded, single, target, draft, given, words):
    width = target.shape[1]
    # All mass, and with it every tie, in one share; a flat row; unusable rows.
    target = target.at[0, : 3 * width // 4].set(-jnp.inf)
    target = target.at[1].set(-5.0).at[2].set(-jnp.inf).at[3, width // 2].set(jnp.nan)
    given["top_k"] = jnp.asarray([7, width // 2, 0, 0, 0], jnp.int32)
    given["top_p"] = jnp.ones(5)
    args = (target, draft, given, words)
    p, _, result = sharded(*args)
    p_one, _, expected = single(*args)
    np.testing.assert_array_equal(p, p_one)
    for name, a, b in zip(NAMES, result, expected, strict=True):
        np.testing.assert_array_equal(a, b, name)
    found = dict(zip(NAMES, map(np.asarray, result), strict=True))
    assert (found["token"] < width).all() and (found["drafts"] < width).all()
    assert not found["accept"][2] and found["token"][2] == -1


@pytest.mark.parametrize("filters", [False, True])
def test_fr08_no_row_travels_between_devices(mesh, filters, rng):
    rows, width = 6, 64 * SHARES
    compiled = split(mesh, filters).lower(*inputs(rng, rows, width)).compile()
    collectives = re.findall(
        r"= (\S+?)\[([\d,]*)\]\S* (all-gather|all-reduce|all-to-all|collective-permute)"
        r"(?:-start)?\(",
        compiled.as_text() or "",
    )
    kinds = {kind for _, _, kind in collectives}
    assert {"all-gather", "all-reduce"} <= kinds
    for _, shape, kind in collectives:
        size = int(np.prod([int(d) for d in shape.split(",") if d]))
        assert size <= rows * SHARES, (kind, shape)
