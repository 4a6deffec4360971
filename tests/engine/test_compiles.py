"""How many programs are compiled, and when."""

import logging

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax import SamplingParams
from dspark_jax.decoding.equivalence import Equivalence, Shape
from tests.engine.conftest import small_model

# Arrays put on the device and cast outside a program. They depend on the batch
# bucket alone and are counted apart from the programs of the compile table.
EAGER = ("stage", "convert_element_type", "_threefry_fold_in")


def calls(rng, count):
    for _ in range(count):
        batch = int(rng.integers(1, 9))
        yield ["".join("a" for _ in range(rng.integers(1, 65))) for _ in range(batch)]


def test_fr31_forty_calls_compile_the_bucket_table_only(
    model, few_buckets, compile_counter
):
    before = model.programs.count
    options = dict(max_new_tokens=2, chat=False)
    for batch in few_buckets.batch:
        # One batch bucket: caches, a short and a long chunk, first token, round.
        for length in (1, 64):
            dspark.generate(model, ["a" * length] * batch, **options)
    grown = model.programs.count - before
    # Other tests may have met some of the buckets before.
    assert grown <= 5 * len(few_buckets.batch)
    table = [p for p in compile_counter.programs if not any(e in p for e in EAGER)]
    assert len(table) == grown, table
    outside = len(compile_counter.programs) - len(table)
    assert outside <= 10 * len(few_buckets.batch)
    compile_counter.restart()
    for _ in range(2):
        for prompts in calls(np.random.default_rng(0), 40):
            dspark.generate(model, prompts, **options)
        assert model.programs.count == before + grown
        assert compile_counter.programs == []


def test_fr31_counter_sees_a_new_bucket(model, compile_counter):
    # Control: an odd capacity is a bucket of its own.
    before = model.programs.count
    options = dict(max_new_tokens=1, chat=False, draft_length=0)
    dspark.generate(model, "ab", capacity=40, **options)
    assert model.programs.count == before + 3
    assert compile_counter.count("run") == 2


def test_fr32_an_option_costs_at_most_one_program(model, compile_counter, monkeypatch):
    # Probed already, and alike; otherwise `deterministic` pads, see `probe`.
    known = Equivalence(model.spec, model.params, inputs=1)
    alike = [Shape("prefill", 1, size, 128) for size in dspark.Buckets().prefill]
    alike += [Shape("round", 1, 3, 128), known.reference("round")]
    known.digests = dict.fromkeys([*alike, known.reference("prefill")], ("same",))
    monkeypatch.setattr(model.programs, "equivalence", known)

    def call(**options):
        settings = dict(max_new_tokens=4, chat=False) | options
        dspark.generate(model, "ab", **settings)

    warm = SamplingParams(temperature=1.0)
    call()
    costs = {
        "nothing": (dict(), 0),
        "logprobs": (dict(logprobs=True), 1),
        "trace": (dict(trace=True), 1),
        "temperature": (dict(sampling=warm), 1),
        "seed": (dict(sampling=SamplingParams(temperature=1.0, seed=3)), 0),
        "top_k": (dict(sampling=SamplingParams(temperature=1.0, top_k=3)), 1),
        # All filters share a program, whichever of them comes first.
        "top_p": (dict(sampling=SamplingParams(temperature=1.0, top_p=0.5)), 0),
        "min_p": (dict(sampling=SamplingParams(temperature=1.0, min_p=0.1)), 0),
        "list": (dict(sampling=[SamplingParams(seed=2)]), 0),
        "stop_ids": (dict(sampling=SamplingParams(stop_ids=(5, 6))), 0),
        "stop": (dict(stop=["xyz"]), 0),
        "policy": (dict(policy=dspark.Fixed(2)), 0),
        "deterministic": (dict(deterministic=True), 0),
        "max_new_tokens": (dict(max_new_tokens=7), 0),
    }
    for again in (False, True):
        for name, (options, most) in costs.items():
            before = model.programs.count
            compile_counter.restart()
            call(**options)
            grown = model.programs.count - before
            assert grown <= (0 if again else most), name
            assert compile_counter.count("run") == grown, name
            if again:
                assert compile_counter.programs == [], name


def test_fr33_one_request_past_the_largest_batch(model, few_buckets):
    largest = few_buckets.batch[-1]
    prompts = [f"{i}ab" for i in range(largest + 1)]
    options = dict(max_new_tokens=6, chat=False)
    more = dspark.generate(model, prompts, **options)
    full = dspark.generate(model, prompts[:-1], **options)
    # One waits for a place: nobody's text changes, and all results are in order.
    assert [r.tokens for r in more[:-1]] == [r.tokens for r in full]
    assert more[-1].tokens == dspark.generate(model, prompts[-1], **options).tokens
    pieces = list(dspark.stream(model, prompts, **options))
    indices = [piece.index for piece in pieces]
    assert set(indices) == set(range(len(prompts)))
    ended = [bool(piece.result) for piece in pieces]
    assert any(ended[: indices.index(largest)])


def test_fr33_seeds_follow_the_list_and_not_the_slot(model, few_buckets):
    # Equal prompts; the last one waits for a place. One token needs no round.
    prompts = ["ab"] * (few_buckets.batch[-1] + 1)
    sampling = SamplingParams(temperature=3.0, seed=11)
    options = dict(max_new_tokens=1, chat=False, sampling=sampling)
    tokens = [r.tokens[0] for r in dspark.generate(model, prompts, **options)]
    assert tokens[-1] != tokens[0]
    assert len(set(tokens)) > len(prompts) // 2
    again = [r.tokens[0] for r in dspark.generate(model, prompts, **options)]
    assert again == tokens
    assert dspark.generate(model, ["ab"], **options)[0].tokens == tokens[:1]


@pytest.mark.slow
def test_compilation_is_logged_and_reported(caplog):
    model = small_model(seed=1)
    with caplog.at_level(logging.INFO, logger="dspark_jax"):
        out = dspark.generate(model, "ab", max_new_tokens=2, chat=False, draft_length=0)
    assert len([r for r in caplog.records if "compiled" in r.message]) == 4
    assert out.stats.programs == model.programs.count == 4
    assert out.stats.compile_seconds > 0
    assert model.info()["programs"] == 4
