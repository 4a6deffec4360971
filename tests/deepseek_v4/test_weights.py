"""Short floats, and the rounding of activations, against recorded vectors."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dspark_jax.checkpoint.v4_tensors import decode_fp4, powers
from dspark_jax.models.deepseek_v4 import rounding, weights
from tests.deepseek_v4.goldens import Runner, arrays, difference, target


@pytest.fixture(scope="module")
def gold():
    return arrays("quant")


def test_tables(gold):
    codes = np.arange(256, dtype=np.uint8)
    found = np.asarray(weights.exponents(jnp.asarray(codes)).astype(jnp.float32))
    np.testing.assert_array_equal(found, gold["e8m0_table"])
    found = np.asarray(weights.e2m1(jnp.asarray(codes[:16])).astype(jnp.float32))
    np.testing.assert_array_equal(found, gold["e2m1_table"])
    table = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(table, gold["e4m3_table"])
    np.testing.assert_array_equal(powers(codes), gold["e8m0_table"])


def test_eight_bits(gold):
    """192 rows: the last block of scales is a partial one."""
    weight, scale = gold["fp8_b.bytes"], gold["fp8_b.scale_e8m0_bytes"]
    found = weights.expand_fp8(jnp.asarray(weight), jnp.asarray(scale))
    assert found.dtype == jnp.bfloat16
    wanted = gold["fp8_b.dequant_e8m0"]
    np.testing.assert_array_equal(np.asarray(found.astype(jnp.float32)), wanted)
    # Control: scales by columns of the wrong block.
    turned = weights.expand_fp8(jnp.asarray(weight), jnp.asarray(scale.T))
    assert (np.asarray(turned.astype(jnp.float32)) != wanted).any()


@pytest.mark.parametrize("name", ["fp4_a", "fp4_b"])
def test_four_bits(gold, name):
    codes, scale = gold[f"{name}.bytes"], gold[f"{name}.scale_e8m0_bytes"]
    wanted = gold[f"{name}.dequant"]
    found = weights.expand_fp4(jnp.asarray(codes), jnp.asarray(scale))
    np.testing.assert_array_equal(np.asarray(found.astype(jnp.float32)), wanted)
    np.testing.assert_array_equal(decode_fp4(codes, powers(scale)), wanted)
    # Control: the high half first.
    swapped = (codes >> 4) | (codes << 4)
    assert (decode_fp4(swapped, powers(scale)) != wanted).any()


def test_rounded_activations(gold):
    x = jnp.asarray(gold["act.x"])
    for found, name in (
        (rounding.round_fp8(x, 64), "fp8_b64_pow2"),
        (rounding.round_fp8(x, 128), "fp8_b128_pow2"),
        (rounding.round_fp4(x, 32), "fp4_b32"),
    ):
        np.testing.assert_array_equal(np.asarray(found), gold[f"act.{name}"], name)
    found = rounding.hadamard(x.reshape(32, 128))
    want = gold["act.hadamard128"]
    assert difference(found, want) <= 1e-5 * np.abs(want).max()


def test_a_model_that_rounds_as_the_published_engine_does():
    """A rounding that falls the other way moves single positions by more."""
    import dataclasses

    config, params = target()
    config = dataclasses.replace(config, round_activations=True)
    runner = Runner(config=config, params=params)
    ids, gold = arrays("hf_prefill")["prompt_a"], arrays("native_prefill")
    logits = np.concatenate([runner.feed(ids[i : i + 15])[0] for i in (0, 15, 30)])
    error = np.abs(logits - gold["a.qat_logits"]).max(axis=1)
    assert np.median(error) <= 1e-4
    assert (error > 5e-3).sum() <= 2
    # Control: without rounding they are further away everywhere.
    plain = np.abs(arrays("hf_prefill")["a.logits"] - gold["a.qat_logits"])
    assert np.median(plain.max(axis=1)) > 20 * np.median(error)
