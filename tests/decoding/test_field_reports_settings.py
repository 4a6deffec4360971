"""Field reports about sampling settings, seeds and options."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dspark_jax as dspark
from dspark_jax.decoding import drafting, laws
from dspark_jax.decoding.words import fold_seeds
from dspark_jax.models import dense
from dspark_jax.models.draft import backbone
from pallas_kernels import integer_rows
from tests.decoding.serving import requests_for
from tests.models.goldens import right_padded
from tests.models.quick import quick_jit

NAN = float("nan")


def test_fr07_drafts_pass_the_requests_filters(monkeypatch):
    vocab, count, new = 50, 512, 9
    rng = np.random.default_rng(7)
    target = rng.normal(size=(vocab, vocab)).astype(np.float32)
    broad = target + 0.5 * rng.normal(size=(vocab, vocab)).astype(np.float32)
    model = dspark.testing.scripted_model(target, broad, gamma=2)
    tokens = jnp.full((count, 1), 3, jnp.int32)
    lengths = jnp.ones((count,), jnp.int32)
    sampling = dspark.SamplingParams(temperature=1.0, top_k=2)

    def run():
        generate = quick_jit(
            lambda params: dspark.generate_tokens(
                model.spec, params, tokens, lengths, seeds=3, max_new_tokens=new,
                sampling=sampling,
            )
        )  # fmt: skip
        out = generate(model.params)
        rounds = int(out.counters.rounds.sum())
        return np.asarray(out.tokens), (count * (new - 1)) / rounds

    def unfiltered(spec, variant, *rest):
        return laws.choose(spec, "sampled", *rest)

    filtered_tokens, filtered_length = run()
    monkeypatch.setattr(drafting, "laws", SimpleNamespace(choose=unfiltered))
    broad_tokens, broad_length = run()
    assert filtered_length > 1.2 * broad_length

    # The second token is the first that a round emits.
    best = np.argsort(-target, axis=1)[:, :2]
    two = np.take_along_axis(target, best, 1)
    law = np.exp(two) / np.exp(two).sum(1, keepdims=True)
    for emitted in (filtered_tokens, broad_tokens):
        seen, expected = [], []
        for i, first in enumerate(best[3]):
            for j, second in enumerate(best[first]):
                hits = (emitted[:, 0] == first) & (emitted[:, 1] == second)
                seen.append(hits.sum())
                expected.append(count * law[3, i] * law[first, j])
        # Nothing outside the filter is ever emitted.
        assert sum(seen) == count
        assert stats.chisquare(seen, expected).pvalue > 1e-3


def test_a_row_takes_every_setting_from_its_own_request():
    settings = [
        dspark.SamplingParams(temperature=1.0),
        dspark.SamplingParams(temperature=0.5),
        dspark.SamplingParams(temperature=1.0, top_p=0.5),
        dspark.SamplingParams(temperature=1.0, top_k=9),
        dspark.SamplingParams(temperature=1.0, min_p=0.3),
    ]
    target = dspark.testing.tiny_config()
    spec = dspark.Spec(target, dspark.testing.tiny_draft_config(target))
    law = quick_jit(lambda *args: integer_rows(*laws.filtered(spec, "filtered", *args)))
    order = np.asarray([4, 0, 3, 1, 2, 4], np.int32)
    logits = np.random.default_rng(0).normal(size=(1, 32)).astype(np.float32)
    logits = np.repeat(logits, len(order), 0)
    found = np.asarray(law(logits, requests_for(*settings), order))
    for row, request in enumerate(order):
        same = requests_for(*[settings[request]] * len(settings))
        np.testing.assert_array_equal(found[row], law(logits, same, order)[row])
    # Each of them makes another law of the same logits.
    assert len(np.unique(found, axis=0)) == len(settings)


def test_fr15_one_seed_gives_every_request_its_own_stream():
    model = dspark.testing.tiny_model("qwen3")
    tokens, lengths = right_padded([[1, 2, 3]] * 8)
    run = quick_jit(
        lambda params, seeds: dspark.generate_tokens(
            model.spec, params, tokens, lengths, seeds=seeds, max_new_tokens=16,
            sampling=dspark.SamplingParams(temperature=1.0),
        )
    )  # fmt: skip
    one = np.asarray(run(model.params, fold_seeds(0, 8)).tokens)
    assert len({tuple(row) for row in one.tolist()}) >= 7
    again = np.asarray(run(model.params, fold_seeds(0, 8)).tokens)
    assert (again == one).all()
    other = np.asarray(run(model.params, fold_seeds(1, 8)).tokens)
    assert (other != one).any(axis=1).all()
    # Control: one stream for all is one text.
    same = np.asarray(run(model.params, np.zeros((8, 2), np.uint32)).tokens)
    assert len({tuple(row) for row in same.tolist()}) == 1


def test_fr15_unseeded_calls_differ(bytes_model):
    sampling = dspark.SamplingParams(temperature=4.0)
    options = dict(sampling=sampling, max_new_tokens=16, chat=False)
    texts = [dspark.generate(bytes_model, "p", **options).tokens for _ in range(2)]
    assert texts[0] != texts[1]


def test_fr16_seeded_request_does_not_see_earlier_calls(bytes_model):
    def call(seed):
        sampling = dspark.SamplingParams(temperature=4.0, seed=seed)
        return dspark.generate(
            bytes_model, "p", sampling=sampling, max_new_tokens=16, chat=False
        )

    first = call(1).tokens
    others = [call(seed).tokens for seed in range(2, 7)]
    assert call(1).tokens == first
    assert all(tokens != first for tokens in others)


def test_fr22_depth_is_checked_before_tracing(compile_counter):
    target = dspark.testing.tiny_config("qwen3")
    draft = dspark.testing.tiny_draft_config(target, gamma=7)
    shapes = {
        "target": dense.abstract_params(target),
        "draft": backbone.abstract_draft_params(draft),
    }
    model = dspark.make_model(
        dspark.Spec(target, draft), shapes, dspark.testing.byte_tokenizer()
    )
    tokens, lengths = right_padded([[1, 2]])
    compile_counter.restart()
    for depth in (8, 15, -1, True, 2.0):
        with pytest.raises(ValueError, match=r"draft_length.*0\.\.7"):
            dspark.generate_tokens(
                model.spec, model.params, tokens, lengths, max_new_tokens=4,
                draft_length=depth,
            )  # fmt: skip
        with pytest.raises(ValueError, match=r"draft_length.*0\.\.7"):
            dspark.generate(model, "a", draft_length=depth)
    assert compile_counter.programs == []
    out = jax.eval_shape(
        lambda params: dspark.generate_tokens(
            model.spec, params, tokens, lengths, max_new_tokens=4, draft_length=7
        ),
        model.params,
    )
    assert out.counters.kept.shape == (1, 7)


def test_fr53_the_name_of_an_option_for_grammars_is_told(bytes_model, compile_counter):
    compile_counter.restart()
    with pytest.raises(ValueError, match="`grammar` is not an option; give `matchers`"):
        dspark.generate(bytes_model, "p", grammar="root ::= x")
    assert compile_counter.programs == []


OUT_OF_RANGE = [
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", float("inf")),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", NAN),
    ("top_k", -2),
    ("top_k", 0),
    ("top_k", 2.5),
    ("min_p", -0.1),
    ("min_p", 1.0),
    ("min_p", NAN),
    ("repetition_penalty", 0.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", NAN),
    ("seed", -1),
    ("seed", 2**64),
    ("stop_ids", (-1,)),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_fr54_settings_out_of_range(name, value, compile_counter):
    with pytest.raises(ValueError, match=f"`{name}`"):
        dspark.SamplingParams(**{name: value})
    assert compile_counter.programs == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("verification", "loose"),
        ("deterministic", 1),
        ("policy", 3),
        ("stop", ""),
        ("repetition_penalty", 0.0),
        ("logit_bias", {}),
    ],
)
def test_fr54_options_out_of_range(bytes_model, name, value, compile_counter):
    compile_counter.restart()
    with pytest.raises(ValueError, match=f"`{name}`"):
        dspark.generate(bytes_model, "p", chat=False, **{name: value})
    assert compile_counter.programs == []


def test_fr54_limits_themselves_are_allowed():
    for options in (
        {"temperature": 0.0},
        {"top_p": 1.0},
        {"top_k": -1},
        {"top_k": 1},
        {"min_p": 0.0},
        {"seed": 2**64 - 1},
    ):
        dspark.SamplingParams(**options)
