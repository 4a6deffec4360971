"""Rows of blocks that differ in length."""

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.rows import first_rows, packed_rows, uniform_rows

TOKENS = jnp.arange(12, dtype=jnp.int32).reshape(3, 4) + 10
START = jnp.asarray([7, 0, 30], jnp.int32)


def packed(lengths, bucket, width=5):
    return packed_rows(TOKENS, jnp.asarray(lengths, jnp.int32), START, width, bucket)


@pytest.mark.parametrize(
    "lengths", [[1, 1, 1], [4, 4, 4], [2, 4, 1], [0, 3, 2], [3, 0, 0], [0, 0, 0]]
)
def test_every_row_in_its_place(lengths):
    rows = packed(lengths, 13)
    wanted = [(r, j) for r, count in enumerate(lengths) for j in range(count)]
    assert np.asarray(rows.is_real).tolist() == [g < len(wanted) for g in range(13)]
    for g, (request, step) in enumerate(wanted):
        assert (int(rows.request[g]), int(rows.local_step[g])) == (request, step)
        assert int(rows.token[g]) == int(TOKENS[request, step])
        assert int(rows.position[g]) == int(START[request]) + step
    # What pads must not point out of the arrays.
    assert (np.asarray(rows.request) < 3).all() and (
        np.asarray(rows.request) >= 0
    ).all()
    assert (np.asarray(rows.local_step)[len(wanted) :] == 0).all()


def test_padding_and_back():
    rows = packed([2, 4, 1], 9)
    values = jnp.where(rows.is_real, rows.token, -1)
    block = np.asarray(rows.pad(values))
    assert block.tolist() == [[10, 11, 0, 0, 0], [14, 15, 16, 17, 0], [18, 0, 0, 0, 0]]
    again = np.asarray(rows.flat(jnp.asarray(block)))
    real = np.asarray(rows.is_real)
    assert (again[real] == np.asarray(values)[real]).all()


def test_equal_lengths_are_the_uniform_rows():
    lengths = jnp.full((3,), 4, jnp.int32)
    uniform = uniform_rows(TOKENS, lengths, START, 5, 14)
    rows = packed([4, 4, 4], 14)
    for name in ("token", "request", "local_step", "position", "is_real", "start"):
        have, want = (np.asarray(getattr(x, name)) for x in (rows, uniform))
        real = np.asarray(uniform.is_real) if have.shape == (14,) else slice(None)
        assert (have[real] == want[real]).all(), name


def test_the_first_rows():
    rows = packed([2, 1, 1], 9)
    few = first_rows(rows, 4)
    assert few.token.tolist() == rows.token[:4].tolist()
    assert few.is_real.all() and few.start.shape == (3,)
    assert (
        np.asarray(few.pad(few.token)).tolist()
        == np.asarray(rows.pad(rows.token)).tolist()
    )
