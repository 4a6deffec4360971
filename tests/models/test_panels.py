"""Cut matrices: the same numbers in another order of memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models import panels
from dspark_jax.models.layers import matmul
from dspark_jax.models.params import check_tree, for_cpu
from dspark_jax.testing import tiny_config


def weight(out: int, into: int, dtype: str = "bfloat16") -> jax.Array:
    return jax.random.normal(jax.random.key(0), (out, into)).astype(dtype)


@pytest.mark.parametrize("shape", [(576, 576), (1536, 576), (576, 1536)])
@pytest.mark.parametrize("rows", [1, 2, 6, 40])
def test_products_are_the_same_to_the_bit(shape, rows):
    whole = weight(*shape)
    x = jax.random.normal(jax.random.key(1), (rows, shape[1]))
    plain = np.asarray(jax.jit(matmul)(x, whole))
    assert (np.asarray(jax.jit(matmul)(x, panels.cut(whole))) == plain).all()


def test_leading_axes_are_kept():
    x = jax.random.normal(jax.random.key(1), (2, 3, 576))
    assert matmul(x, panels.cut(weight(640, 576))).shape == (2, 3, 640)


@pytest.mark.parametrize(
    ("leaf", "cut"),
    [
        (weight(512, 8), True),
        (weight(512, 8, "float16"), True),
        (weight(512, 8, "float32"), False),
        (weight(448, 8), False),
        (weight(520, 8), False),
        (weight(512, 8)[:, 0], False),
    ],
)
def test_what_is_cut(leaf, cut):
    assert panels.can_cut(leaf) is cut


def test_control_panels_of_the_wrong_axis_give_other_products():
    whole = weight(576, 576)
    x = jax.random.normal(jax.random.key(1), (2, 576))
    wrong = whole.reshape(9, 64, 576).reshape(9, 576, 64)
    assert (np.asarray(matmul(x, wrong)) != np.asarray(matmul(x, whole))).any()


def test_a_cut_tree_still_matches_its_declaration():
    from dspark_jax.models import dense
    from dspark_jax.models.params import random_params

    config = tiny_config("llama", hidden_size=512, dtype="bfloat16")
    shapes = dense.abstract_params(config)
    params = for_cpu(random_params(shapes, jax.random.key(0)))
    layer = params["layers"]["full"]["0"]
    assert layer["o_proj"]["weight"].ndim == 3
    check_tree(params, shapes, "target")
    again = for_cpu(params)
    assert again["layers"]["full"]["0"]["o_proj"]["weight"] is layer["o_proj"]["weight"]
    layer["o_proj"]["weight"] = jnp.zeros((8, 448, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="o_proj"):
        check_tree(params, shapes, "target")
