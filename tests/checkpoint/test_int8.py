"""Drafts stored in 8-bit integers."""

import json

import jax
import numpy as np
import pytest

from dspark_jax.checkpoint.int8_rows import dequantise, quantise
from dspark_jax.checkpoint.native import (
    read_native,
    rewrite_native_config,
    write_native,
)
from dspark_jax.errors import CheckpointError
from dspark_jax.models.draft import backbone
from dspark_jax.models.params import flatten, random_params
from dspark_jax.testing.tiny import tiny_config, tiny_draft_config


def test_rows_keep_their_largest_weight_and_half_a_step():
    x = np.random.default_rng(0).normal(size=(3, 5, 64)).astype(np.float32)
    x[0, 1] = 0.0
    x[1, 2] *= 1e-6
    q, scale = quantise(x)
    assert q.dtype == np.int8 and scale.shape == (3, 5)
    back = dequantise(q, scale)
    assert (np.abs(back - x) <= 0.5 * scale[..., None] * (1 + 1e-5)).all()
    np.testing.assert_allclose(
        np.abs(back).max(axis=-1), np.abs(x).max(axis=-1), rtol=1e-6
    )
    assert (np.abs(q).max(axis=-1)[x.any(axis=-1)] == 127).all()
    assert not back[0, 1].any()
    again, same = quantise(back)
    np.testing.assert_array_equal(again, q)
    np.testing.assert_allclose(same, scale, rtol=1e-6)
    # One scale for all rows would lose the small one.
    whole = np.abs(x).max() / 127
    assert not np.rint(x[1, 2] / whole).any()


def test_a_draft_comes_back_in_its_dtype(tmp_path):
    target = tiny_config(dtype="bfloat16")
    config = tiny_draft_config(target, layers=2)
    params = random_params(backbone.abstract_draft_params(config), jax.random.key(0))
    write_native(tmp_path / "plain", config, params)
    write_native(tmp_path / "small", config, params, int8=True)
    sizes = [
        (tmp_path / name / "model.safetensors").stat().st_size
        for name in ("plain", "small")
    ]
    assert sizes[1] < 0.75 * sizes[0]
    found, have = read_native(tmp_path / "small")
    assert found == config
    have, want = flatten(have), flatten(params)
    for path, leaf in want.items():
        assert have[path].dtype == leaf.dtype
        a, b = np.asarray(have[path], np.float32), np.asarray(leaf, np.float32)
        if "norm" in path[-2] or path[0] == "confidence":
            np.testing.assert_array_equal(a, b)
        else:
            # Half a step of 1/127, and bfloat16's own rounding.
            bound = np.abs(b).max(axis=-1, keepdims=True) * (0.5 / 127 + 2**-8)
            assert (np.abs(a - b) <= bound).all()
            assert (a != b).any()

    rewrite_native_config(tmp_path / "small", config)
    assert read_native(tmp_path / "small")[0] == config
    header = json.loads((tmp_path / "small" / "config.json").read_text())
    header["version"] = 3
    (tmp_path / "small" / "config.json").write_text(json.dumps(header))
    with pytest.raises(CheckpointError, match="version 3"):
        read_native(tmp_path / "small")
