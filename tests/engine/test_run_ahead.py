"""A second round in flight: when it is launched, and what becomes of it."""

import pytest

import dspark_jax as dspark
from dspark_jax import SamplingParams
from dspark_jax.decoding import batch as batch_module

PROMPTS = ["a", "hello there", "xyz" * 8]


def generate(model, prompts, **options):
    settings = dict(max_new_tokens=20, chat=False, draft_length=2) | options
    return dspark.generate(model, prompts, **settings)


@pytest.mark.parametrize("length", [0, 2])
def test_no_round_is_launched_that_nobody_uses(model, launched, length):
    # Budgets end the requests, and those are known ahead.
    outs = generate(model, PROMPTS, draft_length=length)
    assert {out.finish_reason for out in outs} == {"length"}
    assert len(launched) == max(out.stats.rounds for out in outs)


def test_a_full_cache_is_known_ahead_too(model, launched):
    out = generate(model, "a" * 120, capacity=128)
    assert out.finish_reason == "cache_full" and len(out.tokens) == 8
    assert len(launched) == out.stats.rounds


def test_a_stop_token_wastes_one_round_at_most(model, plain, launched):
    row = plain(["hello there"], 20)[0]
    end = row[7]
    sampling = [SamplingParams(stop_ids=(end,))]
    out = generate(model, ["hello there"], sampling=sampling)[0]
    assert out.finish_reason == "stop" and out.tokens == row[: row.index(end) + 1]
    assert len(launched) - out.stats.rounds in (0, 1)


def test_tokens_of_a_round_in_flight_do_not_reach_an_ended_request(model, plain):
    text = bytes(plain(["hello there"], 20)[0]).decode()
    first = generate(model, "hello there", stop=text[4:6])
    known = list(b"hello there") + first.tokens
    assert first.state.tokens == known
    # The batch moved on by a round; the next turn starts where the text ends.
    second = generate(model, "?", state=first.state, max_new_tokens=8)
    assert second.tokens == plain([[*known, ord("?")]], 8)[0]
    assert second.state.tokens == [*known, ord("?"), *second.tokens]


def test_an_ended_request_takes_nothing_while_others_run_on(model, plain):
    texts = [bytes(row).decode() for row in plain(PROMPTS, 20)]
    outs = generate(model, PROMPTS, stop=texts[1][4:7])
    assert outs[1].finish_reason == "stop_string" and outs[2].finish_reason == "length"
    for prompt, out in zip(PROMPTS, outs, strict=True):
        assert out.state.tokens == [*prompt.encode(), *out.tokens]


def test_a_stream_closed_early_can_go_on(model, plain):
    pieces = dspark.stream(
        model, "hello there", max_new_tokens=20, chat=False, draft_length=2
    )
    seen = [token for _, piece in zip(range(3), pieces, strict=False)
            for token in piece.tokens]  # fmt: skip
    pieces.close()
    assert seen == plain(["hello there"], 20)[0][: len(seen)]
    again = generate(model, "hello there")
    assert again.tokens == plain(["hello there"], 20)[0]


def test_one_round_at_a_time_gives_the_same(model, monkeypatch):
    ahead = generate(model, PROMPTS, sampling=SamplingParams(temperature=1.0, seed=3))
    monkeypatch.setattr(batch_module, "AHEAD", 1)
    alone = generate(model, PROMPTS, sampling=SamplingParams(temperature=1.0, seed=3))
    assert [out.tokens for out in ahead] == [out.tokens for out in alone]
    assert [out.text for out in ahead] == [out.text for out in alone]
