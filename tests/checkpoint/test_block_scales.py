"""8-bit floats with block scales, and configs that only claim them."""

import logging

import ml_dtypes
import numpy as np
import pytest

from dspark_jax.checkpoint.block_scales import dequantise_blocks
from dspark_jax.checkpoint.source import open_source
from dspark_jax.errors import CheckpointError

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_fr42_ragged_blocks_and_both_scale_dtypes(rng, dtype):
    weight = rng.standard_normal((130, 200)).astype(ml_dtypes.float8_e4m3fn)
    exact = rng.uniform(0.01, 2, (2, 2)).astype(np.float32)
    got = dequantise_blocks(weight, exact.astype(dtype))
    want = np.empty((130, 200), np.float32)
    for i in range(130):
        for j in range(200):
            want[i, j] = np.float32(weight[i, j]) * exact[i // 128, j // 128]
    scale = np.abs(want).max()
    tolerance = 0 if dtype == np.float32 else 2**-8
    assert got.dtype == np.float32 and got.shape == (130, 200)
    assert np.abs(got - want).max() <= tolerance * scale
    # Blocks laid the other way round are far off.
    assert np.abs(dequantise_blocks(weight, exact.T) - want).max() > 0.1 * scale


def test_scales_that_do_not_cover_the_weight(rng):
    weight = np.zeros((130, 200), ml_dtypes.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"needs \(2, 2\)"):
        dequantise_blocks(weight, np.ones((1, 2), np.float32))


def quantised(model, block=(32, 48)):
    """Every projection as float8 with block scales; and what they stand for."""
    model.config["quantization_config"] = {**FP8, "weight_block_size": list(block)}
    model.config["dtype"] = "bfloat16"
    want = {}
    for name in [n for n in model.tensors if "_proj" in n]:
        weight = model.tensors[name]
        rows, columns = (-(-n // b) for n, b in zip(weight.shape, block, strict=True))
        scales = np.random.default_rng(rows).uniform(0.5, 2, (rows, columns))
        scales = scales.astype(np.float32)
        model.tensors[name] = weight.astype(ml_dtypes.float8_e4m3fn)
        model.tensors[f"{name}_scale_inv"] = scales
        want[name] = dequantise_blocks(model.tensors[name], scales, block)
    for name in model.tensors:
        if "_proj" not in name:
            value = model.tensors[name].astype(ml_dtypes.bfloat16)
            model.tensors[name] = value
    return want


def test_fr42_checkpoint_is_dequantised(folder, tmp_path):
    model = folder("llama_rand/target")
    want = quantised(model)
    source = open_source(model.write(tmp_path))
    assert source.config.dtype == "bfloat16"
    leaf = source.read_leaf(("layers", "full", "up_proj", "weight"))
    for layer in range(4):
        exact = want[f"model.layers.{layer}.mlp.up_proj.weight"]
        np.testing.assert_array_equal(leaf[layer], exact.astype(ml_dtypes.bfloat16))


def test_fr42_missing_or_misshapen_scales(folder, tmp_path):
    model = folder("llama_rand/target")
    quantised(model)
    name = "model.layers.2.mlp.up_proj.weight_scale_inv"
    scales = model.tensors.pop(name)
    with pytest.raises(CheckpointError, match="up_proj.weight is an 8-bit"):
        open_source(model.write(tmp_path / "missing"))
    model.tensors[name] = np.ascontiguousarray(scales[:1])
    with pytest.raises(CheckpointError, match=r"weight_scale_inv has shape \(1, 2\)"):
        open_source(model.write(tmp_path / "shape"))


def test_fr43_full_precision_weights_are_left_alone(folder, tmp_path, caplog):
    model = folder("llama_rand/target")
    for name, value in model.tensors.items():
        model.tensors[name] = value.astype(ml_dtypes.bfloat16)
    model.config["quantization_config"] = FP8
    with caplog.at_level(logging.WARNING):
        source = open_source(model.write(tmp_path))
    assert "fp8" in caplog.text and "as they are" in caplog.text
    assert source.config.dtype == "bfloat16"
    np.testing.assert_array_equal(
        source.read_leaf(("embed", "weight")),
        model.tensors["model.embed_tokens.weight"],
    )


def test_fr43_scales_beside_full_precision_weights(folder, tmp_path):
    model = folder("llama_rand/target")
    model.config["quantization_config"] = FP8
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    model.tensors[name] = np.ones((2, 1), np.float32)
    with pytest.raises(CheckpointError, match="fp8.*up_proj.weight_scale_inv"):
        open_source(model.write(tmp_path))


def test_other_quantisation_is_refused_by_name(folder, tmp_path):
    model = folder("llama_rand/target")
    model.config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    model.tensors["model.layers.0.mlp.up_proj.qweight"] = np.ones((2, 2), np.int32)
    with pytest.raises(CheckpointError, match="gptq"):
        open_source(model.write(tmp_path))
