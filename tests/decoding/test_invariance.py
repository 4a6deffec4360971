"""One request's result does not depend on its batch, its padding or its drafts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding import generate_tokens as loop_module
from dspark_jax.decoding import prefill as prefill_module
from dspark_jax.decoding import round as round_module
from dspark_jax.decoding.state import new_state
from dspark_jax.evaluation.divergence import judge, top2_margins
from dspark_jax.models import dense
from dspark_jax.models.draft.proposal import Proposal
from tests.decoding.serving import requests_for
from tests.models.goldens import pair, right_padded, traces
from tests.models.quick import quick_jit

PROMPTS = [[5, 9, 2], [7, 8, 9, 10, 11, 12, 13, 14, 15], [40], [3, 1, 4, 1, 5, 9]]
NEW, GAMMA = 20, 4
ARCHITECTURES = ("qwen3", "llama", "gemma4")


@functools.cache
def tiny(architecture, stacked=False, gamma=GAMMA, dtype="float32", **draft):
    target = dspark.testing.tiny_config(architecture, dtype=dtype)
    config = dspark.testing.tiny_draft_config(target, gamma=gamma, **draft)
    return dspark.testing.tiny_model(
        target=target, draft=config, seed=1, stacked=stacked
    )


def greedy(model, tokens, lengths, n, new=NEW):
    """TokensOut of one fresh program."""

    def run(params, tokens, lengths):
        return dspark.generate_tokens(
            model.spec, params, tokens, lengths, max_new_tokens=new, draft_length=n,
            sampling=dspark.SamplingParams(stop_ids=()),
        )  # fmt: skip

    return jax.tree.map(np.asarray, quick_jit(run)(model.params, tokens, lengths))


@functools.cache
def plain(architecture):
    return greedy(tiny(architecture), *right_padded(PROMPTS), 0).tokens


def oracle(lines, spoil_every):
    """Stands in for drafting: the plain continuation, spoilt here and there."""
    prompt = jnp.asarray([len(p) for p in PROMPTS], jnp.int32)

    def draft_next(spec, params, state, requests, words, n, variant):
        at = (state.length - prompt)[:, None] + 1
        at = at + jnp.arange(n, dtype=jnp.int32)[None]
        ids = jnp.take_along_axis(jnp.asarray(lines), jnp.clip(at, 0, NEW - 1), 1)
        row = jnp.arange(len(PROMPTS), dtype=jnp.int32)[:, None]
        ids = jnp.where((at + row) % spoil_every == 0, ids + 1, ids) % 256
        none = jnp.zeros(ids.shape, jnp.float32)
        return Proposal(ids, None, None, none, state.length + 1)

    return draft_next


ORACLE_CASES = [
    *[("qwen3", n) for n in range(1, GAMMA + 1)],
    ("llama", GAMMA),
    ("gemma4", 1),
    ("gemma4", GAMMA),
    *[
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("llama", 1),
            ("llama", 2),
            ("llama", 3),
            ("gemma4", 2),
            ("gemma4", 3),
        )
    ],
]


@pytest.mark.parametrize(("architecture", "n"), ORACLE_CASES)
def test_fr23_every_depth_equals_plain(architecture, n, monkeypatch):
    """With drafts that are kept and drafts that fall, at every depth."""
    model, lines = tiny(architecture), plain(architecture)
    replacement = oracle(lines, spoil_every=5)
    monkeypatch.setattr(prefill_module, "draft_next", replacement)
    monkeypatch.setattr(round_module, "draft_next", replacement)
    out = greedy(model, *right_padded(PROMPTS), n)
    assert (out.tokens == lines).all()
    kept, proposed = out.counters.kept.sum(0), out.counters.proposed.sum(0)
    assert (kept > 0).all() and kept.sum() < proposed.sum()


HEADS = {
    "llama": ("llama", {}),
    "gemma4": ("gemma4", {}),
    "vanilla": ("qwen3", {}),
    "gated": ("qwen3", {"head": "gated"}),
    "rnn": ("qwen3", {"head": "rnn"}),
    "none": ("qwen3", {"head": "none"}),
    "anchor_row_dropped": ("qwen3", {"sample_from_anchor": False}),
    "reduced_vocabulary": ("qwen3", {"draft_vocab_size": 40}),
    "sliding_draft": ("qwen3", {"window": 3, "layers": 2}),
}


# Those that the recorded traces or the depths above cover as well are slow.
FAST = {
    4: ("vanilla", "anchor_row_dropped", "reduced_vocabulary", "sliding_draft"),
    1: ("vanilla",),
}


@pytest.mark.parametrize(
    ("case", "batch"),
    [
        pytest.param(case, batch, marks=() if case in FAST[batch] else pytest.mark.slow)
        for batch in FAST
        for case in HEADS
    ],
)
def test_real_drafts_equal_plain(case, batch):
    architecture, options = HEADS[case]
    model = tiny(architecture, **options)
    tokens, lengths = right_padded(PROMPTS)
    if batch == 4:
        assert (
            greedy(model, tokens, lengths, GAMMA).tokens == plain(architecture)
        ).all()
        return
    out = greedy(model, tokens[1:2], lengths[1:2], GAMMA)
    assert (out.tokens == plain(architecture)[1:2]).all()


def test_stacked_layers_equal_listed_ones():
    model = tiny("qwen3", stacked=True)
    out = greedy(model, *right_padded(PROMPTS), 2)
    assert (out.tokens == plain("qwen3")).all()


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, 7))
def test_fr23_trained_pair_at_every_depth(n):
    """The reference's own generations, with real acceptance of every length."""
    batch = traces("trained")
    tokens, lengths = right_padded([t["prompt_ids"] for t in batch])
    out = greedy(pair("trained"), tokens, lengths, n, new=96)
    for row, trace in zip(out.tokens, batch, strict=True):
        assert (row == trace["output_ids"][len(trace["prompt_ids"]) :]).all()
    assert (out.counters.kept.sum(0) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [5, 7])
def test_fr23_depth_equal_to_the_block_size(gamma):
    for n in range(1, gamma + 1):
        out = greedy(tiny("qwen3", gamma=gamma), *right_padded(PROMPTS), n)
        assert (out.tokens == plain("qwen3")).all()


# Mixed settings: one program serves all of what follows.
MIXED = [
    dspark.SamplingParams(stop_ids=()),
    dspark.SamplingParams(temperature=1.0, seed=1, stop_ids=()),
    dspark.SamplingParams(temperature=0.7, top_p=0.9, seed=2, stop_ids=()),
    dspark.SamplingParams(
        temperature=1.3, top_k=5, min_p=0.05, seed=2**40, stop_ids=()
    ),
]


@pytest.fixture(scope="module")
def mixed():
    model = tiny("qwen3")

    def run(params, tokens, lengths, requests):
        return dspark.generate_tokens(
            model.spec, params, tokens, lengths, requests=requests,
            variant="filtered", max_new_tokens=NEW, logprobs=True, capacity=48,
        )  # fmt: skip

    program = quick_jit(run)

    def call(tokens, lengths, requests):
        out = program(model.params, tokens, lengths, requests)
        return jax.tree.map(np.asarray, out)

    return call


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_batch_order_does_not_matter(mixed):
    tokens, lengths = right_padded(PROMPTS)
    requests = requests_for(*MIXED)
    straight = mixed(tokens, lengths, requests)
    order = np.asarray([2, 0, 3, 1])

    def pick(tree):
        return jax.tree.map(lambda x: x[order], tree)

    assert_same(mixed(tokens[order], lengths[order], pick(requests)), pick(straight))
    # The rows are different requests with different results.
    assert len({tuple(row) for row in straight.tokens.tolist()}) == len(PROMPTS)


def test_fr34_padding_content_does_not_matter(mixed):
    tokens, lengths = right_padded(PROMPTS)
    noise = np.random.default_rng(0).integers(0, 256, tokens.shape, np.int32)
    real = np.arange(tokens.shape[1])[None] < np.asarray(lengths)[:, None]
    other = jnp.asarray(np.where(real, tokens, noise))
    requests = requests_for(*MIXED)
    assert (np.asarray(other) != np.asarray(tokens)).any()
    assert_same(mixed(other, lengths, requests), mixed(tokens, lengths, requests))
    # Control: real tokens do matter.
    changed = jnp.asarray(tokens).at[:, 0].add(1)
    assert (
        (
            mixed(changed, lengths, requests).tokens
            != mixed(tokens, lengths, requests).tokens
        )
        .any(axis=1)
        .all()
    )


def test_fr34_positions_of_short_and_long_rows(monkeypatch):
    model, (tokens, lengths) = tiny("qwen3"), right_padded([[4, 5], list(range(9))])
    seen = []
    real = dense.evaluate

    def spy(config, params, cache, capacity, rows, *rest):
        seen.append(rows)
        return real(config, params, cache, capacity, rows, *rest)

    @quick_jit
    def positions(params, tokens, lengths):
        state = new_state(model.spec, 2, 16, 0, False)
        logits = jnp.zeros((2, model.spec.target.vocab_size), jnp.float32)
        prefill_module.feed(model.spec, params, state, logits, tokens, lengths)
        return seen[0].position, seen[0].is_real

    monkeypatch.setattr(dense, "evaluate", spy)
    position, is_real = positions(model.params, tokens, lengths)
    position, is_real = (np.asarray(x).reshape(2, -1) for x in (position, is_real))
    for row, length in enumerate((2, 9)):
        assert is_real[row].sum() == length
        assert position[row][is_real[row]].tolist() == list(range(length))


def test_requests_alone_equal_the_batch(mixed):
    """Per-request settings and seeds, and another batch bucket."""
    tokens, lengths = right_padded(PROMPTS)
    together = mixed(tokens, lengths, requests_for(*MIXED))
    for row, sampling in enumerate(MIXED):
        one = slice(row, row + 1)
        alone = mixed(tokens[one], lengths[one], requests_for(sampling))
        assert (alone.tokens[0] == together.tokens[row]).all()
        np.testing.assert_allclose(
            alone.logprobs[0], together.logprobs[row], rtol=0, atol=1e-4
        )
    # The greedy request among sampled ones is the greedy program's.
    assert (together.tokens[0] == plain("qwen3")[0]).all()


def test_prompt_padding_does_not_matter():
    """Another prompt bucket, that is another width of the padded prompts."""
    tokens, lengths = right_padded(PROMPTS)
    wide = jnp.pad(tokens, ((0, 0), (0, 7)), constant_values=3)
    out = greedy(tiny("qwen3"), wide, lengths, 2)
    assert (out.tokens == plain("qwen3")).all()


def test_prompts_that_end_in_different_chunks(monkeypatch):
    """What follows a short prompt is not made of a later chunk's padding."""

    class SmallChunks(dspark.Buckets):
        def __init__(self):
            super().__init__(prefill=(4,))

    lines = plain("qwen3")
    monkeypatch.setattr(loop_module, "Buckets", SmallChunks)
    out = greedy(tiny("qwen3"), *right_padded(PROMPTS), 2)
    assert (out.tokens == lines).all()


FR17_PROMPTS = [[11], [2, 3], [9, 8, 7, 6], list(range(50, 60)), [100, 3, 100, 3]]


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, 9))
def test_fr17_float32_two_hundred_tokens(n):
    tokens, lengths = right_padded(FR17_PROMPTS)
    model = tiny("qwen3", gamma=8)
    assert (
        greedy(model, tokens, lengths, n, new=200).tokens
        == _fr17_plain("float32").tokens
    ).all()


@functools.cache
def _fr17_plain(dtype):
    tokens, lengths = right_padded(FR17_PROMPTS)
    return greedy(tiny("qwen3", gamma=8, dtype=dtype), tokens, lengths, 0, new=200)


@pytest.mark.slow
def test_fr17_bfloat16_differs_at_near_ties_only(record_property):
    """Where bfloat16 generations part, the two best logits are within 0.1.

    One unit of bfloat16 at the size of these logits is 0.06.
    """
    model = tiny("qwen3", gamma=8, dtype="bfloat16")
    model = dataclasses.replace(
        model, spec=dataclasses.replace(model.spec, cache_dtype="bfloat16")
    )
    tokens, lengths = right_padded(FR17_PROMPTS)
    base = greedy(model, tokens, lengths, 0, new=200).tokens
    lines, ends = right_padded(
        [[*p, *row] for p, row in zip(FR17_PROMPTS, base.tolist(), strict=True)]
    )
    margins = quick_jit(lambda params, *line: top2_margins(model.spec, params, *line))(
        model.params, lines, ends
    )
    for n in (1, 4, 8):
        out = greedy(model, tokens, lengths, n, new=200).tokens
        for row, prompt in enumerate(FR17_PROMPTS):
            own = np.asarray(margins)[row, len(prompt) - 1 :]
            verdict = judge(base[row].tolist(), out[row].tolist(), own, near_tie=0.1)
            record_property(f"n{n}_row{row}", str(verdict))
            assert verdict.verdict != "mismatch", verdict


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float16_weights_decode_as_float32_ones_nearly_do(architecture):
    """Same tokens with drafts, and log-probabilities as of the weights cast up."""
    half = tiny(architecture, dtype="float16")
    target = dataclasses.replace(half.spec.target, dtype="float32")
    whole = dspark.make_model(
        dataclasses.replace(half.spec, target=target, draft=None),
        {
            "target": jax.tree.map(
                lambda x: x.astype(jnp.float32), half.params["target"]
            )
        },
    )
    tokens, lengths = right_padded(PROMPTS)

    def first(model):
        run = quick_jit(
            lambda params: dspark.generate_tokens(
                model.spec, params, tokens, lengths, max_new_tokens=1,
                draft_length=0, logprobs=True,
                sampling=dspark.SamplingParams(stop_ids=()),
            )
        )  # fmt: skip
        return jax.tree.map(np.asarray, run(model.params))

    np.testing.assert_array_equal(
        greedy(half, tokens, lengths, GAMMA).tokens,
        greedy(half, tokens, lengths, 0).tokens,
    )
    one, other = first(half), first(whole)
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=0.05)
