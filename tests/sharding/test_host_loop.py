"""`generate` on a mesh: state in its shards, the same text."""

import jax
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax import SamplingParams
from dspark_jax.decoding.placement import places
from tests.sharding.conftest import make_mesh, on_mesh, one_device

PROMPTS = ["ab", "hello there", "x", "0123456789", "yes"]


def placed(x):
    return tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec))


def generate(model, **options):
    return dspark.generate(model, PROMPTS, chat=False, **options)


@pytest.mark.parametrize(
    "kv_heads, axis",
    [(8, "tensor"), pytest.param(2, None, marks=pytest.mark.slow)],
)
def test_generate_on_a_mesh(kv_heads, axis):
    plain = one_device(kv_heads)
    model = on_mesh(plain, make_mesh(2, 4))
    sampling = [SamplingParams(temperature=1.0, seed=i) for i in range(5)]
    options = dict(max_new_tokens=8, sampling=sampling, draft_length=0)
    # Some end early: the state is touched from the host between rounds.
    options["stop"] = generate(plain, **options)[1].text[3:5]
    outs, expected = generate(model, **options), generate(plain, **options)
    assert [o.tokens for o in outs] == [o.tokens for o in expected]
    assert {o.finish_reason for o in expected} == {"length", "stop_string"}
    state = outs[0].state.batch.state
    for cache in jax.tree.leaves((state.target, state.draft)):
        # [layers, B, K, slots, d]
        assert placed(cache) == (None, "data", axis, None, None)
        share = 2 * (4 if axis else 1)
        assert cache.addressable_shards[0].data.nbytes * share == cache.nbytes
    more, other = (
        dspark.generate(
            m, [" more"] * 5, chat=False, max_new_tokens=3, draft_length=0,
            state=[o.state for o in result],
        )
        for m, result in ((model, outs), (plain, expected))
    )  # fmt: skip
    assert [o.tokens for o in more] == [o.tokens for o in other]


@pytest.mark.slow
def test_generate_on_a_mesh_with_a_draft():
    plain = one_device(8)
    model = on_mesh(plain, make_mesh(2, 4))
    sampling = SamplingParams(temperature=1.0, top_k=50, seed=2)
    options = dict(max_new_tokens=10, sampling=sampling, logprobs=True)
    outs, expected = generate(model, **options), generate(plain, **options)
    for out, one in zip(outs, expected, strict=True):
        assert out.tokens == one.tokens
        np.testing.assert_allclose(out.logprobs, one.logprobs, atol=1e-4)
    state = outs[0].state.batch.state
    assert placed(jax.tree.leaves(state.draft)[0]) == (
        None, "data", "tensor", None, None,
    )  # fmt: skip
    count = model.programs.count
    generate(model, **options)
    assert model.programs.count == count


def test_scalars_lie_whole():
    spec = on_mesh(one_device(8), make_mesh(2, 4)).spec
    # Places of joining requests, and a round's rows.
    row, batch = places(spec, (np.int32(1), np.zeros((4,), np.int32)))
    assert row.is_fully_replicated and tuple(batch.spec) == ("data",)
