"""Field reports about caches, windows, padding and what a program materialises."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax import Buckets
from dspark_jax.decoding.batch import Batch, Settings
from dspark_jax.decoding.extras import Extras
from dspark_jax.models import dense
from dspark_jax.models.draft import backbone
from dspark_jax.models.draft.proposal import propose
from dspark_jax.models.kv_cache import empty_cache
from dspark_jax.models.rows import dense_rows
from pallas_kernels import argmax_ids
from tests.decoding.serving import requests_for
from tests.models.quick import quick_jit

CAPACITY = 128


@pytest.fixture(scope="module")
def model():
    """One model, so that the host loop's programs are compiled once."""
    target = dspark.testing.tiny_config("qwen3")
    draft = dspark.testing.tiny_draft_config(target, gamma=2)
    return dspark.testing.tiny_model(target=target, draft=draft, seed=4)


def new_batch(model, capacity=CAPACITY):
    requests = requests_for(dspark.SamplingParams())
    return Batch(
        model.spec, model.params, model.programs, requests, 1, capacity, 2,
        Settings("greedy", Extras()),
    )  # fmt: skip


def finish(batch, out):
    while out.finish[0] == 0:
        out = batch.step()
    return batch.tokens[0]


@pytest.mark.parametrize("window", [4, None])
def test_fr19_drafts_keep_to_their_window(window):
    target = dspark.testing.tiny_config("qwen3")
    config = dspark.testing.tiny_draft_config(target, gamma=4, window=window, layers=2)
    model = dspark.testing.tiny_model(target=target, draft=config)
    length, rng = 10, np.random.default_rng(0)
    width = len(config.target_layer_ids) * target.hidden_size
    features = rng.normal(size=(length, width)).astype(np.float32)
    # The anchor at position 10 sees 7, 8 and 9; later rows of the block see less.
    old, near = features.copy(), features.copy()
    old[:7] = rng.normal(size=(7, width))
    near[7:] = rng.normal(size=(3, width))

    @quick_jit
    def logits(params, features):
        start = jnp.zeros((3,), jnp.int32)
        cache = empty_cache(config.backbone, 3, 32, jnp.dtype("float32"), False)
        rows = dense_rows(jnp.zeros((3, length), jnp.int32), start + length, start)
        draft = params["draft"]
        flat = features.reshape(3 * length, width)
        cache = backbone.inject(config, draft, cache, flat, rows, start + length)
        return propose(
            config, draft, params["target"], cache, 32, start + 5, start + length,
            jnp.zeros((3, 4), jnp.uint32), lambda x, _: (argmax_ids(x), None, None),
        )[1]  # fmt: skip

    base, of_old, of_near = np.asarray(
        logits(model.params, np.stack([features, old, near]))
    )
    assert (np.abs(of_near - base).max() > 1e-3).all()
    if window is None:
        assert np.abs(of_old - base).max() > 1e-3
    else:
        assert (of_old == base).all()


def test_fr25_second_turn_drafts_from_the_whole_context(model):
    first, second = list(range(40, 51)), [7, 9, 11]

    def waiting(batch):
        """The waiting proposal, copied as the next round takes its buffers."""
        proposal = batch.state.proposal
        return np.array(proposal.ids), np.array(proposal.confidence)

    batch = new_batch(model)
    history = list(finish(batch, batch.start([first], [6])))
    assert len(history) == len(first) + 6
    # What was never committed must not matter: fill it with large numbers.
    state = batch.state
    cached = len(history) - 1

    def spoil(x):
        noise = np.random.default_rng(0).normal(size=x.shape).astype(x.dtype) * 1e6
        unused = np.arange(x.shape[-2])[:, None] >= cached
        return jnp.asarray(np.where(unused, noise, np.asarray(x)))

    batch.state = dataclasses.replace(
        state,
        target=jax.tree.map(spoil, state.target),
        draft=jax.tree.map(spoil, state.draft),
    )
    onward = batch.start([second], [6])
    ids, confidence = waiting(batch)
    fresh = new_batch(model)
    again = fresh.start([history + second], [6])
    wanted_ids, wanted_confidence = waiting(fresh)
    assert onward.emitted == again.emitted
    assert (ids == wanted_ids).all()
    np.testing.assert_allclose(confidence, wanted_confidence, rtol=0, atol=1e-4)
    assert finish(batch, onward) == finish(fresh, again)
    # Control: with a context that was never fed the draft is another.
    short = new_batch(model)
    short.start([[*history[-1:], *second]], [6])
    assert np.abs(waiting(short)[1] - wanted_confidence).max() > 1e-2


def shapes_of(target, draft):
    """Parameters as shapes: nothing is computed with them."""
    return {
        "target": dense.abstract_params(target),
        "draft": backbone.abstract_draft_params(draft),
    }


def inner_values(jaxpr):
    """Shapes of all values that a program makes, those of inner programs too."""
    for equation in jaxpr.eqns:
        for value in equation.outvars:
            yield tuple(getattr(value.aval, "shape", ()))
        for parameter in equation.params.values():
            parts = parameter if isinstance(parameter, list | tuple) else [parameter]
            for part in parts:
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from inner_values(inner)


def repeats_heads(shapes, heads, context, width):
    """Whether keys or values of the whole context exist once a query head."""
    size = heads * context * width
    return any(shape[-1:] == (width,) and np.prod(shape) >= size for shape in shapes)


def test_fr27_draft_step_does_not_repeat_keys():
    heads, context = 8, 1024
    target = dspark.testing.tiny_config(
        "qwen3", hidden_size=64, num_heads=heads, num_kv_heads=2
    )
    target = dataclasses.replace(target, max_position=2048)
    config = dspark.testing.tiny_draft_config(target, gamma=5, layers=2)
    width = config.backbone.attention("full").head_dim
    params = shapes_of(target, config)
    cache = jax.eval_shape(
        lambda: empty_cache(config.backbone, 1, context, jnp.dtype("float32"), True)
    )

    def step(params, cache):
        return propose(
            config, params["draft"], params["target"], cache, context,
            jnp.asarray([5], jnp.int32), jnp.asarray([context - 8], jnp.int32),
            jnp.zeros((1, 5), jnp.uint32), lambda x, _: (argmax_ids(x), None, None),
        )  # fmt: skip

    shapes = list(inner_values(jax.make_jaxpr(step)(params, cache).jaxpr))
    assert not repeats_heads(shapes, heads, context, width)
    # Control: the same step with repeated keys is noticed.
    repeated = jax.make_jaxpr(
        lambda cache: jnp.repeat(cache["full"]["k"][0], heads // 2, axis=1)
    )(cache)
    assert repeats_heads(inner_values(repeated.jaxpr), heads, context, width)


@pytest.mark.parametrize("variant", ["greedy", "filtered"])
def test_fr37_no_buffer_of_logits_over_the_length(variant):
    vocab, new, n, batch = 1000, 256, 4, 2
    target = dspark.testing.tiny_config("qwen3", vocab_size=vocab)
    draft = dspark.testing.tiny_draft_config(target, gamma=n)
    spec, params = dspark.Spec(target, draft), shapes_of(target, draft)
    sampling = dspark.SamplingParams(
        temperature=0.0 if variant == "greedy" else 1.0, top_p=0.9
    )

    def run(params, tokens, lengths):
        return dspark.generate_tokens(
            spec, params, tokens, lengths, max_new_tokens=new, sampling=sampling,
            logprobs=True,
        )  # fmt: skip

    tokens = jnp.zeros((batch, 8), jnp.int32)
    lengths = jnp.full((batch,), 8, jnp.int32)
    jaxpr = jax.make_jaxpr(run)(params, tokens, lengths).jaxpr
    shapes = list(inner_values(jaxpr))
    of_logits = [s for s in shapes if vocab in s and s[-1] == vocab]
    assert of_logits
    assert not [s for s in shapes if vocab in s and any(new <= d < vocab for d in s)]
    assert max(np.prod(s) for s in of_logits) <= batch * (n + 1) * vocab


EDGES = [16, 64, pytest.param(256, marks=pytest.mark.slow)]


@pytest.mark.parametrize("edge", EDGES)
def test_fr38_prompts_around_a_bucket_edge(model, edge):
    """The reference is the greedy text of the whole sequence, without a cache."""
    assert edge in Buckets().prefill
    new = 5
    prompts = [
        np.random.default_rng(length).integers(0, 250, length).tolist()
        for length in (edge - 1, edge, edge + 1)
    ]
    capacity = Buckets.fit(edge + 1 + new, Buckets().capacity)
    width = edge + 1 + new
    config = model.spec.target

    @quick_jit
    def best(params, lines):
        cache = empty_cache(config, 3, width, jnp.dtype("float32"), False)
        zero = jnp.zeros((3,), jnp.int32)
        rows = dense_rows(lines, zero + width, zero)
        logits, _, _ = dense.evaluate(config, params["target"], cache, width, rows)
        return argmax_ids(logits).reshape(3, width)

    lines = np.zeros((3, width), np.int32)
    for row, prompt in zip(lines, prompts, strict=True):
        row[: len(prompt)] = prompt
    for step in range(new):
        after = np.asarray(best(model.params, lines))
        for row, prompt in enumerate(prompts):
            at = len(prompt) + step
            lines[row, at] = after[row, at - 1]
    for row, prompt in enumerate(prompts):
        batch = new_batch(model, capacity)
        tokens = finish(batch, batch.start([prompt], [new]))
        assert tokens == lines[row, : len(prompt) + new].tolist()
