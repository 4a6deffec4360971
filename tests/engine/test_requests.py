"""Requests of one batch: lengths, endings, next turns, closed streams."""

import gc

import jax
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax import SamplingParams

PROMPTS = ["a", "hello there", "xyz" * 8, "0123456789" * 6]


@pytest.fixture(scope="module")
def texts(model, plain):
    """Greedy text of 20 tokens after every prompt."""
    return [bytes(row).decode() for row in plain(PROMPTS, 20)]


def generate(model, prompts, **options):
    settings = dict(max_new_tokens=20, chat=False) | options
    return dspark.generate(model, prompts, **settings)


def test_prompts_of_all_lengths_in_one_batch(model, texts):
    outs = generate(model, PROMPTS)
    assert [o.text for o in outs] == texts
    assert {o.finish_reason for o in outs} == {"length"}
    assert generate(model, PROMPTS[1]).text == texts[1]


def test_a_request_that_ends_early_leaves_the_others_alone(model, texts):
    ends = [ord(text[k]) for text, k in zip(texts, (3, 0, 7, 12), strict=True)]
    sampling = [SamplingParams(stop_ids=(end,)) for end in ends]
    sampling[3] = SamplingParams()
    outs = generate(model, PROMPTS, sampling=sampling)
    for out, text, end in zip(outs[:3], texts, ends, strict=False):
        # The end token is counted, not shown.
        assert out.finish_reason == "stop"
        assert out.text == text[: text.index(chr(end))]
        assert out.tokens[-1] == end and len(out.tokens) == len(out.text) + 1
    assert (outs[3].text, outs[3].finish_reason) == (texts[3], "length")


def test_a_stop_string_halts_one_request(model, texts):
    stop = texts[2][5:8]
    outs = generate(model, PROMPTS, stop=stop)
    for out, text in zip(outs, texts, strict=True):
        where = text.find(stop)
        assert out.text == (text if where < 0 else text[:where])
        assert out.finish_reason == ("length" if where < 0 else "stop_string")
        assert len(out.tokens) == (20 if where < 0 else where + len(stop))
    assert outs[2].finish_reason == "stop_string"


def test_pieces_add_up(model, texts):
    shown = ["" for _ in PROMPTS]
    tokens = [[] for _ in PROMPTS]
    ended = []
    for piece in dspark.stream(model, PROMPTS, max_new_tokens=20, chat=False):
        assert piece.index not in ended
        shown[piece.index] += piece.text
        tokens[piece.index] += piece.tokens
        if piece.result is not None:
            ended.append(piece.index)
            assert piece.result.text == shown[piece.index]
            assert piece.result.tokens == tokens[piece.index]
            assert piece.finish_reason == piece.result.finish_reason
    assert shown == texts and sorted(ended) == [0, 1, 2, 3]


def test_a_closed_stream_frees_its_caches(model, texts):
    def caches():
        gc.collect()
        return sum(x.ndim == 4 and x.shape[0] == 8 for x in jax.live_arrays())

    before = caches()
    pieces = dspark.stream(model, PROMPTS, max_new_tokens=20, chat=False)
    next(pieces)
    assert caches() > before
    pieces.close()
    assert caches() == before
    assert list(pieces) == []
    assert [o.text for o in generate(model, PROMPTS)] == texts


@pytest.mark.parametrize("stop", [False, True])
def test_the_next_turn_equals_one_long_prefill(model, plain, texts, stop):
    # Also after a stop string, which cuts tokens that were already committed.
    options = dict(stop=texts[1][6:8]) if stop else {}
    first = generate(model, PROMPTS, max_new_tokens=12, **options)
    seen = [o.state.tokens for o in first]
    assert [s[-len(o.tokens) :] for s, o in zip(seen, first, strict=True)] == [
        o.tokens for o in first
    ]
    more = [" more", "?", "and so on and so forth", "!"]
    keep = [s + list(m.encode()) for s, m in zip(seen, more, strict=True)]
    # The reference takes prompts of up to 64 tokens.
    short = [row for row, ids in enumerate(keep) if len(ids) <= 64]
    assert len(short) == 3
    second = generate(model, more, max_new_tokens=10, state=[o.state for o in first])
    expected = plain([keep[row] for row in short], 10)
    assert [second[row].tokens for row in short] == expected
    assert [o.state.tokens[: len(k)] for o, k in zip(second, keep, strict=True)] == keep


def test_the_next_turn_has_settings_of_its_own(model, plain):
    first = generate(model, "hello there", max_new_tokens=4)
    row = plain([[*first.state.tokens, ord("?")]], 10)[0]
    ends = SamplingParams(stop_ids=(row[3],))
    second = generate(model, "?", state=first.state, sampling=ends, logprobs=True)
    assert second.finish_reason == "stop"
    assert second.tokens == row[: row.index(row[3]) + 1]
    assert len(second.logprobs) == len(second.tokens)


def test_a_state_does_not_shrink(model):
    first = generate(model, "hello there", max_new_tokens=4)
    with pytest.raises(ValueError, match="`capacity` is 20 but the state has"):
        generate(model, "?", state=first.state, capacity=20)
    held = first.state.batch.capacity
    assert generate(model, "?", state=first.state, capacity=held).tokens


def test_greedy_and_sampled_requests_in_one_batch(model, texts):
    """Whichever of them comes first."""
    greedy, warm = SamplingParams(), SamplingParams(temperature=3.0, seed=5)
    after_greedy = generate(model, PROMPTS, sampling=[greedy, greedy, warm, greedy])
    after_warm = generate(model, PROMPTS, sampling=[warm, greedy, warm, greedy])
    assert after_greedy[2].tokens == after_warm[2].tokens
    for outs, rows in ((after_greedy, (0, 1, 3)), (after_warm, (1, 3))):
        equal = [out.text == text for out, text in zip(outs, texts, strict=True)]
        assert [row for row, same in enumerate(equal) if same] == list(rows)


@pytest.mark.slow
def test_a_next_turn_that_needs_a_larger_cache(model, plain):
    first = generate(model, "ab", max_new_tokens=4)
    # Nothing but the capacity may differ.
    ids = first.state.tokens + list(b"cd")
    second = generate(model, "cd", max_new_tokens=150, state=first.state)
    assert second.tokens[:20] == plain([ids], 20)[0]
    assert len(second.tokens) == 150


def test_a_state_serves_once(model):
    first = generate(model, "ab", max_new_tokens=4)
    generate(model, "cd", max_new_tokens=4, state=first.state)
    with pytest.raises(ValueError, match="`state`"):
        generate(model, "ef", max_new_tokens=4, state=first.state)


def test_states_of_another_call_are_refused(model):
    one, two = (generate(model, ["ab", "cd"], max_new_tokens=2) for _ in range(2))
    for states in ([one[0].state, two[1].state], [one[1].state, one[0].state]):
        with pytest.raises(ValueError, match="all requests of one earlier call"):
            generate(model, ["x", "y"], state=states)
    with pytest.raises(ValueError, match="`draft_length` is 0 but"):
        generate(model, ["x", "y"], state=[o.state for o in one], draft_length=0)


@pytest.mark.parametrize(
    "temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)]
)
def test_logprobs_are_the_targets_own(model, temperature):
    # Filters and temperature do not enter them.
    sampling = SamplingParams(temperature=temperature, top_k=9, seed=5)
    out = generate(model, "ab", max_new_tokens=8, logprobs=True, sampling=sampling)
    ids, logits = [*b"ab", *out.tokens], np.zeros((8, 264), np.float32)
    tokens = np.zeros((8, 16), np.int32)
    tokens[:, : len(ids)] = ids
    lengths = np.arange(2, 10, dtype=np.int32)
    state = model.programs.init(8, 128, model.spec.gamma)
    _, rows = model.programs.feed(
        model.params, state, jax.numpy.asarray(logits), tokens, lengths
    )
    rows = np.asarray(rows, np.float64)
    top = rows.max(axis=1, keepdims=True)
    log_p = rows - top - np.log(np.exp(rows - top).sum(axis=1, keepdims=True))
    expected = log_p[np.arange(8), out.tokens]
    np.testing.assert_allclose(out.logprobs, expected, rtol=1e-5, atol=1e-5)
    # Control: the rows before give other numbers.
    assert np.abs(log_p[np.arange(8) - 1, out.tokens] - expected).max() > 1e-2
    assert generate(model, "ab", max_new_tokens=2).logprobs is None


def test_a_call_that_does_not_fit_is_refused_before_it_starts(model, monkeypatch):
    monkeypatch.setattr("dspark_jax.memory.free_bytes", lambda: 100_000)
    before = model.programs.count
    with pytest.raises(ValueError) as error:
        generate(model, PROMPTS, max_new_tokens=300)
    for part in ("8 requests", "512", "GiB are free", "cache", "fewer prompts"):
        assert part in str(error.value)
    assert model.programs.count == before
    # Unknown free memory is no reason to refuse.
    monkeypatch.setattr("dspark_jax.memory.free_bytes", lambda: None)
    assert len(generate(model, "ab", max_new_tokens=2).tokens) == 2
