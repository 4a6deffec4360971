"""The same tokens on one device and on meshes of eight."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax import SamplingParams
from dspark_jax.decoding.prefill import feed
from dspark_jax.decoding.state import new_state
from tests.sharding.conftest import make_mesh, on_mesh, one_device

BATCH, PROMPT, NEW = 8, 12, 12
# Greedy, sampled and filtered requests side by side in one program.
SAMPLING = (
    [SamplingParams()] * 2
    + [SamplingParams(temperature=1.0)] * 3
    + [SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01)] * 3
)


@functools.partial(jax.jit, static_argnums=(0, 5))
def run(spec, params, tokens, lengths, requests, draft_length):
    """Generated tokens, and the logits that the prompts end with."""
    out = dspark.generate_tokens(
        spec,
        params,
        tokens,
        lengths,
        max_new_tokens=NEW,
        requests=requests,
        variant="filtered",
        draft_length=draft_length,
        logprobs=True,
    )
    state = new_state(spec, BATCH, PROMPT, 0, stacked=True)
    logits = jnp.zeros((BATCH, spec.target.vocab_size), jnp.float32)
    return out, feed(spec, params, state, logits, tokens, lengths)[1]


def arguments():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 128, (BATCH, PROMPT)).astype(np.int32)
    lengths = np.asarray([3, 12, 7, 5, 1, 9, 8, 12], np.int32)
    seeds = rng.integers(0, 2**32, (BATCH, 2), dtype=np.uint32)
    return tokens, lengths, dspark.pack_requests(SAMPLING, seeds, ())


@functools.cache
def reference(kv_heads, reduced, draft_length):
    model = one_device(kv_heads, reduced)
    return run(model.spec, model.params, *arguments(), draft_length)


def check(shape, kv_heads=8, reduced=None, draft_length=2):
    model = on_mesh(one_device(kv_heads, reduced), make_mesh(*shape))
    out, logits = run(model.spec, model.params, *arguments(), draft_length)
    expected, plain_logits = reference(kv_heads, reduced, draft_length)
    plain_logits = np.asarray(plain_logits)
    # Ids that do not exist are -inf on both.
    real = np.isfinite(plain_logits)
    assert (np.isfinite(logits) == real).all() and real.any(axis=1).all()
    gap = np.abs(np.asarray(logits)[real] - plain_logits[real]).max()
    assert gap <= 1e-5 * np.abs(plain_logits[real]).max()
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_array_equal(out.lengths, expected.lengths)
    np.testing.assert_array_equal(out.counters.kept, expected.counters.kept)
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-4)
    if draft_length:
        kept = np.asarray(out.counters.kept).sum(1)
        # Some drafts stood and some fell; of a reduced vocabulary a request's few
        # rounds may keep none.
        assert (kept[2:] > 0).mean() > 0.5
        assert (kept[2:] < draft_length * np.asarray(out.counters.rounds)[2:]).any()


def test_fr08_two_by_four_with_a_draft():
    check((2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 8), (8, 1)])
def test_fr08_other_meshes_with_a_draft(shape):
    check(shape)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 4), (1, 8), (8, 1)])
def test_target_only(shape):
    check(shape, draft_length=0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 4), (1, 8)])
def test_few_key_value_heads_are_replicated(shape):
    mesh = make_mesh(*shape)
    params = on_mesh(one_device(2), mesh).params
    layer = params["target"]["layers"]["full"]
    assert layer["k_proj"]["weight"].sharding.is_fully_replicated
    assert not layer["q_proj"]["weight"].sharding.is_fully_replicated
    check(shape, kv_heads=2)


@pytest.mark.slow
@pytest.mark.parametrize("reduced", [40, 41])
def test_a_reduced_draft_vocabulary(reduced):
    # 41 rows do not divide: the draft's head is replicated, the target's is not.
    check((2, 4), reduced=reduced)


def test_other_seeds_give_other_tokens():
    # Control: equality above is no accident of flat or peaked rows.
    expected, _ = reference(8, None, 2)
    tokens, lengths, requests = arguments()
    requests = dataclasses.replace(requests, seeds=requests.seeds + np.uint32(1))
    model = one_device(8, None)
    out, _ = run(model.spec, model.params, tokens, lengths, requests, 2)
    same = np.asarray(out.tokens == expected.tokens).all(axis=1)
    assert same.tolist() == [True] * 2 + [False] * 6
