"""Shared noise: a seed's text whatever is drafted, and how often drafts stand."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding import laws
from dspark_jax.decoding import words as words_module
from dspark_jax.decoding.words import round_words
from pallas_kernels import noisy_argmax
from tests.decoding.scripts import with_draft_ids
from tests.decoding.serving import requests_for
from tests.models.goldens import arrays, pair
from tests.models.quick import quick_jit
from tests.sharding.conftest import make_mesh

NEW, GAMMA = 24, 3
PROMPTS = ["trace_greedy_p0", "trace_greedy_p1", "trace_sampled_T1_p0"]


def prompts():
    return [arrays(f"qwen3_trained/{name}")["prompt_ids"] for name in PROMPTS]


def text(model, n, order, verification="shared_noise", **sampling):
    """Tokens and drafts kept a round, requests in the caller's order."""
    lines = [prompts()[i] for i in order]
    width = max(map(len, lines))
    tokens = np.zeros((len(lines), width), np.int32)
    for row, line in zip(tokens, lines, strict=True):
        row[: len(line)] = line
    seeds = np.asarray([[i, 77] for i in order], np.uint32)

    def run(params):
        return dspark.generate_tokens(
            model.spec,
            params,
            jnp.asarray(tokens),
            jnp.asarray([len(line) for line in lines], jnp.int32),
            seeds=jnp.asarray(seeds),
            max_new_tokens=NEW,
            draft_length=n,
            sampling=dspark.SamplingParams(temperature=1.0, stop_ids=(), **sampling),
            verification=verification,
        )

    out = quick_jit(run)(model.params)
    back = np.argsort(order)
    return np.asarray(out.tokens)[back], int(out.counters.kept.sum())


@functools.cache
def plain():
    return text(pair("trained"), 0, (0, 1, 2))[0]


def longest():
    return pair("trained").spec.gamma


@pytest.mark.parametrize("short", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_seed_has_one_text(short):
    """At every draft length, in any order of the batch."""
    n = longest() - short
    tokens, kept = text(pair("trained"), n, (2, 0, 1))
    np.testing.assert_array_equal(tokens, plain())
    assert kept > 0


@pytest.mark.slow
def test_a_seed_has_one_text_at_all_lengths_and_with_filters():
    for n in range(1, longest() - 1):
        tokens, _ = text(pair("trained"), n, (1, 2, 0))
        np.testing.assert_array_equal(tokens, plain())
    cut = [
        text(pair("trained"), n, (0, 1, 2), top_p=0.8, top_k=9)[0]
        for n in (0, longest())
    ]
    np.testing.assert_array_equal(*cut)
    assert (cut[0] != plain()).any()


@pytest.mark.slow
def test_control_exact_verification_has_another_text_at_another_length():
    model = pair("trained")
    one, _ = text(model, 0, (0, 1, 2), "exact")
    other, _ = text(model, longest(), (0, 1, 2), "exact")
    assert (one != other).any()


def test_control_keys_by_committed_length_change_the_text(monkeypatch):
    """Keyed as exact draws are, a position's noise depends on where rounds begin."""

    def by_round(seeds, committed, length):
        one = round_words(seeds, committed, length)
        return words_module.RoundWords(
            *(jnp.stack([x, x], -1) for x in (one.fresh, one.draft))
        )

    monkeypatch.setattr(words_module, "_noise_keys", by_round)
    model = pair("trained")
    one, _ = text(model, 0, (0, 1, 2))
    other, _ = text(model, longest(), (0, 1, 2))
    assert (one != other).any()


def scripted(p, q):
    with np.errstate(divide="ignore"):
        tables = [np.log(np.tile(row, (len(row), 1))) for row in (p, q)]
    return dspark.testing.scripted_model(*tables, gamma=GAMMA)


def test_drafts_stand_as_often_as_the_closed_form_says():
    """17 of 21 for this pair, against 5 of 6 of exact verification."""
    p, q = np.asarray([3, 2, 1]) / 6, np.asarray([2, 3, 1]) / 6
    model, batch = scripted(p, q), 256
    run = quick_jit(
        lambda params, tokens, lengths: dspark.generate_tokens(
            model.spec, params, tokens, lengths, seeds=5, max_new_tokens=101,
            draft_length=1, verification="shared_noise",
            sampling=dspark.SamplingParams(temperature=1.0, stop_ids=()),
        )
    )  # fmt: skip
    out = run(
        model.params, jnp.ones((batch, 1), jnp.int32), jnp.ones((batch,), jnp.int32)
    )
    rounds = int(out.counters.rounds.sum())
    # The last round may emit less than it accepts.
    kept = int(out.counters.kept.sum()) / rounds
    expected = float(Fraction(17, 21))
    assert abs(kept - expected) < 0.015
    seen = np.bincount(np.asarray(out.tokens).reshape(-1), minlength=3) / (101 * batch)
    np.testing.assert_allclose(seen, p, atol=0.015)


@pytest.mark.slow
def test_text_and_host_loop_agree():
    """`generate` passes the choice on, for a turn and its next one."""
    target = dspark.testing.tiny_config("llama")
    draft = dspark.testing.tiny_draft_config(target, gamma=1)
    model = dspark.testing.tiny_model(target=target, draft=draft, seed=3)
    sampling = [dspark.SamplingParams(temperature=1.0, seed=s) for s in (1, 2)]

    def both(n):
        options = dict(
            sampling=sampling, verification="shared_noise", max_new_tokens=9,
            chat=False, draft_length=n,
        )  # fmt: skip
        first = dspark.generate(model, ["ab", "xyz"], **options)
        states = [one.state for one in first]
        second = dspark.generate(model, ["cd", "w"], state=states, **options)
        return [one.tokens for one in first + second]

    assert both(0) == both(1)
    with pytest.raises(ValueError, match="allowed: 'exact', 'shared_noise'"):
        dspark.generate(model, "ab", verification="gumbel")


def test_a_variant_that_draws_exactly_is_refused():
    """Settings by request name the variant; the two must not disagree."""
    one = dspark.pack_requests(
        [dspark.SamplingParams(temperature=1.0)], np.zeros((1, 2), np.uint32), ()
    )
    model = dspark.testing.scripted_model(np.zeros((3, 3)), np.zeros((3, 3)))
    with pytest.raises(ValueError, match="'noisy', 'noisy_filtered', 'greedy'"):
        dspark.generate_tokens(
            model.spec, model.params, np.ones((1, 2), np.int32),
            np.full(1, 2, np.int32), max_new_tokens=2, requests=one,
            variant="sampled", verification="shared_noise",
        )  # fmt: skip


def test_keys_belong_to_positions():
    seeds = jnp.asarray([[1, 2], [3, 4]], jnp.uint32)
    at = jnp.asarray([5, 9], jnp.int32)
    words = jax.tree.map(np.asarray, round_words(seeds, at, 3, noisy=True))
    later = jax.tree.map(np.asarray, round_words(seeds, at + 2, 3, noisy=True))
    # Two tokens on, rows 0 and 1 are for what were rows 2 and 3.
    np.testing.assert_array_equal(words.fresh[:, 2:], later.fresh[:, :2])
    # The proposal for the position two tokens on is judged by those rows.
    np.testing.assert_array_equal(words.draft[:, 2], later.fresh[:, :3])
    # A text depends on them for good.
    seed = jax.random.wrap_key_data(seeds[1], impl="threefry2x32")
    known = jax.random.fold_in(jax.random.fold_in(seed, 9), words_module.NOISE)
    np.testing.assert_array_equal(words.fresh[1, 0], jax.random.key_data(known))
    keys = words.fresh.reshape(-1, 2)
    assert len(np.unique(keys, axis=0)) == len(keys)


def test_a_reduced_vocabulary_has_the_noise_of_its_ids():
    """The draft knows ids 2 and 0, in that order, and has the target's law."""
    p = np.asarray([1.0, 0.0, 2.0]) / 3
    model, ids = scripted(p, p), np.asarray([2, 0], np.int32)
    model = with_draft_ids(model, ids)
    run = quick_jit(
        lambda params, tokens, lengths: dspark.generate_tokens(
            model.spec, params, tokens, lengths, seeds=5, max_new_tokens=25,
            draft_length=GAMMA, verification="shared_noise",
            sampling=dspark.SamplingParams(temperature=1.0, stop_ids=()),
        )
    )  # fmt: skip
    out = run(model.params, jnp.ones((8, 1), jnp.int32), jnp.ones((8,), jnp.int32))
    # One token of the prefill, then rounds of which every draft stands.
    assert out.counters.rounds.tolist() == [24 // (GAMMA + 1)] * 8
    assert set(np.unique(out.tokens)) == {0, 2}


@pytest.mark.parametrize(
    "shape, variant, sure",
    [
        (None, "noisy_filtered", dspark.SamplingParams(temperature=1.0, top_k=1)),
        ((2, 2), "noisy", dspark.SamplingParams()),
    ],
)
def test_draft_and_target_apply_the_settings_of_their_request(shape, variant, sure):
    """Whole or on a mesh, by columns or by ids; `sure` leaves no choice."""
    rng = np.random.default_rng(3)
    settings = [
        dspark.SamplingParams(temperature=1.0),
        sure,
        dspark.SamplingParams(temperature=0.25),
    ]
    requests = requests_for(*[settings[i % 3] for i in range(48)])
    logits = jnp.asarray(rng.normal(size=(48, 16)), jnp.float32)
    keys = jnp.asarray(rng.integers(0, 2**32, (48, 2), dtype=np.uint32))
    order = jnp.asarray(rng.permutation(16), jnp.int32)
    row = jnp.asarray(rng.permutation(48), jnp.int32)
    spec = dspark.Spec(dspark.testing.tiny_config(), mesh=shape and make_mesh(*shape))

    @quick_jit
    def run(logits, keys):
        at = spec, variant
        drafts = laws.choose(*at, logits, requests, keys)[0]
        columns = laws.choose(*at, logits[:, order], requests, keys, order)[0]
        verdict = laws.verify(
            *at, logits[row], requests, row, drafts[row], None, row % 3 != 0, keys[row]
        )
        return drafts, order[columns], verdict

    drafts, by_id, verdict = run(logits, keys)
    noisy = np.asarray(noisy_argmax(logits, requests.scale, keys))
    first = np.asarray(logits).argmax(1)
    expected = np.where(np.arange(48) % 3 == 1, first, noisy)
    np.testing.assert_array_equal(drafts, expected)
    np.testing.assert_array_equal(by_id, expected)
    np.testing.assert_array_equal(verdict.token, expected[row])
    assert verdict.accept.all()
    # Control: at one temperature, unfiltered, both kinds would have other tokens.
    warm = np.asarray(noisy_argmax(logits, jnp.full(48, requests.scale[0]), keys))
    assert (warm != first)[1::3].any() and (warm != noisy)[2::3].any()
