"""One device, or heads, groups and experts over several: the same tokens."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.checkpoint.load import read_params
from dspark_jax.spec import param_shardings
from dspark_jax.testing.tiny_v4 import write_tiny_v4
from tests.decoding.serving import requests_for
from tests.models.quick import quick_jit
from tests.sharding.conftest import make_mesh

BATCH, NEW, CAPACITY = 2, 8, 32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(config, draft config, parameters) in 8 and 4 bits, layers of all kinds."""
    folder = write_tiny_v4(
        tmp_path_factory.mktemp("v4") / "tiny",
        compress_ratios=[4, 16, 0],
        num_hidden_layers=2,
        num_hash_layers=1,
        dspark_target_layer_ids=[0, 1],
        index_topk=4,
        sliding_window=8,
    )
    _, config, params = read_params(folder)
    _, draft, draft_params = read_params(folder, part="draft")
    return config, draft, {"target": params, "draft": draft_params}


@functools.partial(quick_jit, static_argnums=0)
def run(spec, params, tokens, lengths, requests):
    return dspark.generate_tokens(
        spec, params, tokens, lengths, max_new_tokens=NEW, requests=requests,
        variant="greedy", capacity=CAPACITY,
    )  # fmt: skip


def arguments():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (BATCH, 14)).astype(np.int32)
    lengths = np.asarray([14, 9], np.int32)
    return tokens, lengths, requests_for(*[dspark.SamplingParams()] * BATCH)


@pytest.fixture(scope="module")
def alone(tiny):
    config, draft, params = tiny
    return run(dspark.Spec(config, draft), params, *arguments())


@pytest.mark.parametrize(
    ("data", "tensor"),
    [
        (1, 4),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(1, 8, marks=pytest.mark.slow),
        pytest.param(2, 4, marks=pytest.mark.slow),
    ],
)
def test_tokens_on_a_mesh(tiny, alone, data, tensor):
    config, draft, params = tiny
    spec = dspark.Spec(config, draft, mesh=make_mesh(data, tensor))
    placed = jax.device_put(params, param_shardings(spec))
    experts = placed["target"]["layers"]["0"]["ffn"]["experts"]["w1"]["weight"]
    part = experts.addressable_shards[0].data
    assert part.shape[0] == config.num_experts // tensor
    out = run(spec, placed, *arguments())
    np.testing.assert_array_equal(out.tokens, alone.tokens)
    np.testing.assert_array_equal(out.counters.kept, alone.counters.kept)


def test_what_does_not_divide_is_refused(tiny):
    config, draft, _ = tiny
    odd = dataclasses.replace(config, num_experts=6)
    with pytest.raises(ValueError, match=r"do not divide 6 experts.*divisors of 2"):
        dspark.Spec(odd, draft, mesh=make_mesh(1, 4))
