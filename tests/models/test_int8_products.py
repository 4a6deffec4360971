"""Whole-number products: exact sums, however many rows and whichever way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models import int8
from dspark_jax.models.layers import embed, matmul
from dspark_jax.models.params import check_tree, flatten, for_cpu, random_params
from dspark_jax.testing import tiny_config


def pair(rows: int, out: int, width: int) -> tuple[jax.Array, int8.Int8]:
    x = jax.random.normal(jax.random.key(1), (rows, width)) * 3
    # One loud value, as in the models' down projections.
    x = x.at[0, 5].mul(40.0)
    w = jax.random.normal(jax.random.key(0), (out, width)).astype("bfloat16")
    return x, int8.quantise(w)


@pytest.mark.parametrize("width", [64, 1536, 2144])
def test_both_ways_are_exact(width):
    x, weight = pair(3, 70, width)
    n, unit = int8.whole_numbers(x)
    assert int(jnp.abs(n).max()) == int8.largest(width)
    want = np.asarray(n, np.int64) @ np.asarray(weight.q, np.int64).T
    assert (np.asarray(jax.jit(int8._by_digits)(n, weight.q)) == want).all()
    if int8.lanes_of(width) is not None:
        assert (np.asarray(jax.jit(int8._by_chunks)(n, weight.q)) == want).all()
    y = want.astype(np.float32) * np.asarray(unit) * np.asarray(weight.scale)
    assert (np.asarray(matmul(x, weight)) == y).all()


def test_the_largest_sums_do_not_leave_int32():
    for width in (64, 8192):
        most = int8.largest(width)
        assert most * int8.LARGEST * width < 2**31
        n = jnp.full((1, width), most, jnp.int32).at[0, 0].set(-most)
        q = jnp.full((64, width), int8.LARGEST, jnp.int8)
        want = most * int8.LARGEST * (width - 2)
        assert int(int8._by_digits(n, q)[0, 0]) == want
        assert int(int8._by_chunks(n, q)[0, 0]) == want
    # At one more the largest of narrow rows would need a third digit.
    assert int8.largest(64) == 127 * 128
    # A control: the next whole number does not fit.
    assert (int8.largest(8192) + 1) * int8.LARGEST * 8192 >= 2**31


def test_rows_do_not_depend_on_their_number():
    x, weight = pair(9, 130, 576)
    all_rows = np.asarray(jax.jit(matmul)(x, weight))
    for rows in (1, 2, 4):
        assert (np.asarray(jax.jit(matmul)(x[:rows], weight)) == all_rows[:rows]).all()


def test_a_residual_does_not_swallow_a_rounding():
    x, weight = pair(4, 576, 576)

    def layer(x):
        return x + matmul(x, weight)

    together = np.asarray(jax.jit(layer)(x))
    apart = np.asarray(x) + np.asarray(jax.jit(matmul)(x, weight))
    assert (together == apart).all()
    two = np.asarray(jax.jit(layer)(x[:2]))
    assert (two == apart[:2]).all()


def test_products_are_near_those_of_floats():
    x, weight = pair(4, 130, 576)
    w = np.asarray(weight.q, np.float64) * np.asarray(weight.scale)[:, None]
    want = np.asarray(x, np.float64) @ w.T
    error = np.abs(np.asarray(matmul(x, weight)) - want).max(axis=1)
    # A control: with eight bits for the values, as for the weights, it is far more.
    unit = np.abs(np.asarray(x)).max(axis=1, keepdims=True) / 127
    coarse = np.rint(np.asarray(x) / unit) * unit @ w.T
    assert (error * 30 < np.abs(coarse - want).max(axis=1)).all()


def test_rows_of_zeros_and_leading_axes():
    _, weight = pair(1, 64, 64)
    x = jnp.zeros((2, 3, 64)).at[1, 2].set(1.0)
    y = np.asarray(matmul(x, weight))
    assert y.shape == (2, 3, 64) and not y[0].any() and y[1, 2].any()
    silent = int8.quantise(jnp.zeros((64, 64)))
    assert not np.asarray(matmul(x, silent)).any()


def test_a_table_gives_its_rows():
    _, weight = pair(1, 70, 64)
    ids = jnp.asarray([[3, 69]])
    want = np.asarray(weight.q, np.float32) * np.asarray(weight.scale)[:, None]
    assert (np.asarray(embed(weight, ids)) == want[np.asarray(ids)]).all()
    with pytest.raises(TypeError, match="no index 0"):
        weight[0]


def test_a_tree_of_whole_numbers_matches_its_declaration():
    from dspark_jax.models import dense

    config = tiny_config("llama", hidden_size=64, num_heads=8, dtype="bfloat16")
    shapes = dense.abstract_params(config)
    params = for_cpu(random_params(shapes, jax.random.key(0)), whole_numbers=True)
    check_tree(params, shapes, "target")
    flat = flatten(params)
    kinds = {path[-2]: type(leaf) for path, leaf in flat.items()}
    assert kinds["o_proj"] is int8.Int8 and kinds["embed"] is int8.Int8
    assert kinds["input_norm"] is not int8.Int8
