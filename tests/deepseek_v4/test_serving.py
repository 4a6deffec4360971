"""Policies, sampling, joining and determinism: nothing here knows of the family."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.probing import Probe
from dspark_jax.models import deepseek_v4, family
from dspark_jax.models.deepseek_v4 import hyper
from dspark_jax.models.deepseek_v4.attention import view_of
from dspark_jax.models.deepseek_v4.layer import layer_module
from dspark_jax.models.deepseek_v4.parallel import ALONE
from dspark_jax.models.layers import embed
from dspark_jax.models.rows import dense_rows
from dspark_jax.scheduling.budget import curve
from dspark_jax.testing.tiny_v4 import write_tiny_v4
from tests.deepseek_v4.goldens import FLOAT, arrays, target
from tests.models.quick import quick_jit

SMALL = {
    "compress_ratios": [4, 16, 0, 0],
    "num_hidden_layers": 2,
    "num_hash_layers": 1,
    "dspark_target_layer_ids": [0, 1],
    "index_topk": 3,
    "sliding_window": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
PROMPTS = ["one", "another prompt"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small model of 8-bit and 4-bit floats, loaded as users do."""
    folder = write_tiny_v4(tmp_path_factory.mktemp("v4") / "tiny", **SMALL)
    return dspark.load(folder)


@functools.cache
def costs():
    return dspark.CostModel(curve([2, 4, 6, 8, 10, 12], [8.0 + i for i in range(6)]))


def texts(model, **options):
    warm = options.pop("sampling", {})
    found = dspark.generate(
        model, PROMPTS, max_new_tokens=12, capacity=64, **options,
        sampling=[dspark.SamplingParams(stop_ids=(), **warm)] * 2,
    )  # fmt: skip
    return [result.tokens for result in found]


def test_loaded_with_its_draft(model):
    assert model.spec.gamma == 5 and model.spec.target.weights == "fp8_fp4"
    assert model.info()["architecture"] == "deepseek_v4"


@pytest.mark.slow
def test_drafts_and_a_policy_give_the_plain_text(model):
    plain = texts(model, draft_length=0)
    assert texts(model, policy=dspark.Threshold(survival=0.3)) == plain


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_more_policies_and_requests_that_join(model, batch):
    plain = texts(model, draft_length=0)
    assert texts(model, draft_length=2, batch=batch) == plain
    for policy in (dspark.Budget(), dspark.Gate(), dspark.EarlyStop()):
        assert texts(model, policy=policy, costs=costs(), batch=batch) == plain


@pytest.mark.slow
def test_deterministic_rounds(model):
    """The probe groups shapes; noise that is shared gives one text by any schedule."""
    warm = {"temperature": 0.8, "seed": 3}
    one = texts(model, draft_length=0, deterministic=True, batch=1,
                verification="shared_noise", sampling=warm)  # fmt: skip
    for options in ({"draft_length": 3}, {"policy": dspark.Threshold(survival=0.3)}):
        found = texts(model, deterministic=True, verification="shared_noise",
                      sampling=warm, **options)  # fmt: skip
        assert found == one


def test_probed_shapes_agree_on_what_a_request_keeps(model):
    """Digests cover rings and entries of one request, whatever the capacity."""
    probe = Probe(model.spec, model.params, 3, (2, 64))
    base = probe.digests(True, 2, 4, 64)
    assert None not in base
    assert probe.digests(True, 2, 12, 64) == base
    assert len(set(base)) == 3


def test_a_longer_capacity_keeps_what_is_committed():
    config, _ = target()
    state = deepseek_v4.empty_state(config, 2, 30, FLOAT)
    state = jax.tree.map(
        lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), state
    )
    longer = deepseek_v4.grown(config, state, 30, 70)
    want = deepseek_v4.empty_state(config, 2, 70, FLOAT)
    assert jax.tree.map(jnp.shape, longer) == jax.tree.map(jnp.shape, want)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(longer), strict=True):
        np.testing.assert_array_equal(old, np.asarray(new)[:, : old.shape[1]])


def test_features_are_the_mean_of_a_layers_streams_to_the_bit():
    config, params = target()
    ids = jnp.asarray(arrays("hf_prefill")["prompt_a"][:6])[None]
    count = jnp.full((1,), 6, jnp.int32)

    @quick_jit
    def both(params):
        rows = dense_rows(ids, count, 0 * count)
        state = deepseek_v4.empty_state(config, 1, 16, FLOAT)
        _, features, _ = deepseek_v4.evaluate(config, params, state, 16, rows, (1,))
        x = hyper.spread(embed(params["embed"]["weight"], rows.token), config.streams)
        for layer in (0, 1):
            module = layer_module(config, layer, params["layers"][str(layer)])
            view = view_of(config, config.compress_ratios[layer], rows)
            x, _ = module(x, view, state[str(layer)], ALONE)
        return features, x

    features, streams = both(params)
    np.testing.assert_array_equal(features, streams.mean(axis=1))
    assert np.abs(np.asarray(features) - np.asarray(streams.sum(axis=1))).max() > 1


def test_a_family_has_all_functions():
    for found in (family.target_of(target()[0]), deepseek_v4):
        missing = [
            n
            for n in vars(family.Target)
            if not n.startswith("_") and not hasattr(found, n)
        ]
        assert not missing
    with pytest.raises(ValueError, match="'int8' with a DeepSeek-V4 model"):
        deepseek_v4.for_cpu(target()[0], {}, True)
    with pytest.raises(ValueError, match="`rope_dim` is 128"):
        dataclasses.replace(target()[0], rope_dim=128)
