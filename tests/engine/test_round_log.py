"""The log of rounds: counts, confidences and overlaps of the verified drafts."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax import SamplingParams
from dspark_jax.decoding.extras import Extras
from dspark_jax.models.draft.proposal import propose
from dspark_jax.results import RoundLog
from dspark_jax.transcript import Transcript
from tests.models.quick import quick_jit

PROMPTS = ["ab", "hello", "q"]
# Hot enough that a random draft is accepted now and then.
TEMPERATURE = 6.0
WARM = SamplingParams(temperature=TEMPERATURE, seed=4, stop_ids=())
GREEDY = SamplingParams(stop_ids=())
OPTIONS = dict(max_new_tokens=20, chat=False)


@pytest.fixture(scope="module")
def sampled(model):
    """Requests of one batch, a greedy one among them."""
    sampling = [WARM, GREEDY, dataclasses.replace(WARM, seed=9)]
    return dspark.generate(model, PROMPTS, trace=True, sampling=sampling, **OPTIONS)


def test_the_log_agrees_with_tokens_and_stats(model, sampled):
    gamma = model.spec.gamma
    for prompt, out in zip(PROMPTS, sampled, strict=True):
        logs, stats = out.rounds, out.stats
        assert len(logs) == stats.rounds
        assert sum(one.emitted for one in logs) == len(out.tokens) - 1
        assert sum(one.emitted for one in logs) / len(logs) == stats.accepted_length
        kept = [sum(one.accepted > k for one in logs) for k in range(gamma)]
        assert tuple(k / len(logs) for k in kept) == stats.acceptance
        ends = [len(prompt) + 1]
        ends += itertools.accumulate([o.emitted for o in logs], initial=ends.pop())
        assert [one.position for one in logs] == ends[:-1]
        for one in logs:
            assert one.drafted == gamma == len(one.confidence)
            assert one.emitted in (one.accepted, one.accepted + 1) and not one.stopped
    # All lengths occur, or the counts above would show little.
    logs = [one for out in sampled for one in out.rounds]
    assert {one.accepted for one in logs} == set(range(gamma + 1))
    assert [len(out.rounds[0].overlap) for out in sampled] == [gamma, 0, gamma]
    assert sampled[0].to_json()["rounds"][0] == sampled[0].rounds[0].to_json()


@functools.partial(quick_jit, static_argnames="spec")
def redraft(spec, params, state, anchor, forced):
    """(confidence, corrected logits) along drafts that are given."""

    def choose(logits, word):
        return word.astype(jnp.int32), None, None

    proposal, logits = propose(
        spec.draft, params["draft"], params["target"], state.draft, state.capacity,
        anchor, state.length - 1, forced, choose,
    )  # fmt: skip
    return proposal.confidence, logits


def softmax(logits):
    scaled = logits.astype(np.float64) / TEMPERATURE
    weights = np.exp(scaled - scaled.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def by_hand(model, prompt, out):
    """Per round what is known of its drafts: (confidence, overlap) of draft 0..a."""
    n, ids = model.spec.gamma, [*prompt.encode(), *out.tokens]
    found = []
    for log in out.rounds:
        # What the round verified, as far as it was accepted; behind it, padding.
        block = ids[log.position : log.position + min(log.accepted, n - 1)]
        texts = [ids[: log.position + k] for k in range(len(block) + 1)]
        tokens, lengths = np.zeros((8, 64), np.int32), np.ones(8, np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)], lengths[row] = text, len(text)
        state = model.programs.init(8, 128, n)
        zeros = jnp.zeros((8, model.spec.target.vocab_size), jnp.float32)
        state, rows = model.programs.feed(model.params, state, zeros, tokens, lengths)
        forced = np.zeros((8, n), np.uint32)
        forced[0, : len(block)] = block
        anchor = np.full(8, texts[0][-1], np.int32)
        confidence, logits = redraft(model.spec, model.params, state, anchor, forced)
        known = len(texts)
        p, q = softmax(np.asarray(rows)[:known]), softmax(np.asarray(logits)[0, :known])
        found.append((np.asarray(confidence)[0, :known], np.minimum(p, q).sum(-1)))
    return found


def test_confidence_and_overlap_are_of_the_verified_drafts(model, sampled):
    hand = by_hand(model, PROMPTS[0], sampled[0])
    logs = sampled[0].rounds
    for log, (confidence, overlap) in zip(logs, hand, strict=True):
        known = len(confidence)
        np.testing.assert_allclose(log.confidence[:known], confidence, atol=1e-4)
        # Integer rows differ from real ones by at most an eighth of a unit a token.
        np.testing.assert_allclose(log.overlap[:known], overlap, atol=1e-5)
    assert max(len(confidence) for confidence, _ in hand) == model.spec.gamma
    # Control: the proposals made in the rounds, which the next ones verify, differ.
    for log, (confidence, overlap) in zip(logs, hand[1:], strict=False):
        assert abs(log.confidence[0] - confidence[0]) > 1e-3
        assert abs(log.overlap[0] - overlap[0]) > 1e-5


@pytest.mark.slow
def test_nothing_changes_without_a_trace(model, sampled, monkeypatch):
    fetched = []

    def spy(results):
        fetched.append(len(jax.tree.leaves(results)))
        return jax.device_get(results)

    monkeypatch.setattr(model.programs, "fetch", spy)
    traced = [key for key in model.programs.keys if key[-1] == Extras(trace=True)]
    plain = dspark.generate(model, PROMPTS, sampling=GREEDY, **OPTIONS)
    assert len(fetched) > 2 and set(fetched) == {4}
    assert plain[1].tokens == sampled[1].tokens
    assert plain[1].rounds is None and "rounds" not in plain[1].to_json()
    keys = model.programs.keys
    assert [key for key in keys if key[-1] == Extras(trace=True)] == traced != []
    # Control: a traced round brings two arrays more, the prefill's token none.
    fetched.clear()
    sampling = [WARM, *[GREEDY] * 2]
    dspark.generate(model, PROMPTS, trace=True, sampling=sampling, **OPTIONS)
    assert fetched[0] == 4 and set(fetched[1:]) == {6}
    with pytest.raises(ValueError, match="`trace` is 1; allowed: a bool"):
        dspark.generate(model, "ab", trace=1)


@pytest.mark.slow
def test_plain_decoding_and_shared_noise_have_no_overlap(model):
    options = dict(max_new_tokens=5, chat=False, trace=True)
    plain = dspark.generate(model, "ab", draft_length=0, **options)
    assert plain.rounds == tuple(
        RoundLog(0, 0, 1, False, position, (), ()) for position in range(3, 7)
    )
    options |= dict(verification="shared_noise", sampling=WARM)
    noisy = dspark.generate(model, "ab", **options)
    for one in noisy.rounds:
        assert len(one.confidence) == model.spec.gamma and one.overlap == ()


def test_stop_tokens_and_stop_strings_cut_the_log():
    transcript = Transcript(dspark.testing.byte_tokenizer(), ("c",), 3)
    transcript.take(list(b"x"), 0, 0, [], 0, prefill=True)
    first = RoundLog(3, 2, 3, False, 2, (0.5, 0.0, 1.0), ())
    transcript.take(list(b"aba"), 2, 3, [], 0, False, first)
    # All drafts stand; the string ends behind the second, so neither the third nor
    # the bonus token counts.
    last = RoundLog(3, 3, 4, False, 5, (), ())
    transcript.take(list(b"acab"), 3, 3, [], 0, False, last)
    assert transcript.logs == [first, RoundLog(3, 2, 2, False, 5, (), ())]
