"""Recorded generations of the reference, end to end and law by law.

The reference runs one more round when exactly `max_new_tokens` tokens exist, and
counts tokens past the limit; both are left out of the comparison.
"""

import functools

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding import laws
from dspark_jax.decoding.state import LENGTH, STOP
from pallas_kernels import TOTAL, publish, verify_greedy
from pallas_kernels.verify import reference
from tests.decoding.serving import greedy_rounds, requests_for
from tests.models.goldens import (
    DRAFTS,
    arrays,
    error,
    pair,
    right_padded,
    tolerance,
    traces,
)
from tests.models.quick import quick_jit
from tests.models.teacher import draft_rounds, verify_rounds

TRAINED = (
    "trace_greedy_p0",
    "trace_greedy_p1",
    "trace_short_p1",
    "trace_stop_in_draft_p0",
    "trace_stop_at_last_accepted_p0",
    "trace_stop_in_bonus_p0",
)
SLOW = (pytest.mark.slow,)
STOPPED = [name for name in TRAINED if "stop" in name]


def stop_ids(trace):
    return tuple(int(i) for i in trace.get("stop_token_ids", ()))


def batch_of(name):
    """Greedy traces that are decoded together."""
    if name == "trained":
        return [arrays(f"qwen3_trained/{file}") for file in TRAINED]
    return traces(name)


@functools.partial(
    quick_jit, static_argnames=("spec", "max_new_tokens", "draft_length")
)
def generate(spec, params, tokens, lengths, requests, **options):
    return dspark.generate_tokens(
        spec, params, tokens, lengths, requests=requests, variant="greedy", **options
    )


def batch_arguments(name):
    batch = batch_of(name)
    tokens, lengths = right_padded([t["prompt_ids"] for t in batch])
    sampling = [dspark.SamplingParams(stop_ids=stop_ids(t)) for t in batch]
    limits = [int(t.get("max_new_tokens", t["num_output_tokens"])) for t in batch]
    return batch, tokens, lengths, requests_for(*sampling), limits


@functools.cache
def rounds_of(name):
    _, tokens, lengths, requests, limits = batch_arguments(name)
    capacity, gamma = tokens.shape[1] + max(limits), pair(name).spec.gamma
    return greedy_rounds(pair(name), tokens, lengths, limits, requests, gamma, capacity)


def rounds_within(trace, limit):
    """(rounds that begin below the limit, drafts they keep)."""
    emitted = trace["start"] - len(trace["prompt_ids"]) + 1
    count = int((emitted < limit).sum())
    kept = np.minimum(trace["accepted"], limit - emitted)[:count]
    return count, kept.tolist()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("gemma4", "trained") else SLOW)
        for name in DRAFTS
    ],
)
def test_round_function(name):
    batch, *_, limits = batch_arguments(name)
    for row, trace, limit in zip(rounds_of(name), batch, limits, strict=True):
        count, kept = rounds_within(trace, limit)
        assert row.tokens == trace["output_ids"][len(trace["prompt_ids"]) :].tolist()
        assert row.start == trace["start"][:count].tolist()
        assert row.drafts == trace["draft_tokens"][:count].tolist()
        assert row.kept == kept
        if "confidence_logits" in trace:
            stored = trace["confidence_logits"][:count]
            assert error(np.stack(row.confidence), stored) <= 1e-4
            np.testing.assert_array_equal(row.traced, row.confidence)
            # Control: those of the next proposals are others.
            assert error(np.stack(row.traced[:-1]), stored[1:]) > 0.1
        else:
            assert row.traced == []
        stopped = bool(set(stop_ids(trace)) & set(row.tokens))
        assert row.finish == (STOP if stopped else LENGTH)


@pytest.mark.parametrize("name", DRAFTS)
def test_whole_program(name):
    batch, tokens, lengths, requests, limits = batch_arguments(name)
    spec, params = pair(name).spec, pair(name).params
    longest = max(limits)
    out = generate(spec, params, tokens, lengths, requests, max_new_tokens=longest)
    for i, (trace, limit) in enumerate(zip(batch, limits, strict=True)):
        wanted = trace["output_ids"][len(trace["prompt_ids"]) :]
        emitted = np.asarray(out.tokens)[i]
        assert (emitted[: len(wanted)] == wanted).all()
        if limit < longest:
            # The program has one limit; this row went on behind the trace's.
            continue
        assert out.lengths[i] == len(wanted)
        assert (emitted[len(wanted) :] == -1).all()
        count, kept = rounds_within(trace, limit)
        assert out.counters.rounds[i] == count
        by_position = [sum(k > j for k in kept) for j in range(spec.gamma)]
        assert out.counters.kept[i].tolist() == by_position


def test_short_trace_as_a_whole_program():
    model, trace = pair("trained"), arrays("qwen3_trained/trace_short_p1")
    tokens, lengths = right_padded([trace["prompt_ids"]])
    requests = requests_for(dspark.SamplingParams(stop_ids=()))
    out = generate(
        model.spec, model.params, tokens, lengths, requests, max_new_tokens=10
    )
    assert out.tokens[0].tolist() == trace["output_ids"][tokens.shape[1] :].tolist()
    assert int(out.counters.rounds[0]) == len(trace["start"])
    assert int(out.finish[0]) == LENGTH


@pytest.mark.parametrize("file", STOPPED)
def test_stop_traces_differ_without_their_stop_ids(file):
    trace = arrays(f"qwen3_trained/{file}")
    rows = rounds_of("trained")
    unstopped, stopped = rows[0], rows[TRAINED.index(file)]
    assert len(stopped.tokens) < len(unstopped.tokens)
    assert unstopped.tokens[: len(stopped.tokens)] == stopped.tokens
    assert stopped.tokens[-1] in stop_ids(trace)
    assert bool(trace["terminated_by_stop"][-1]) == ("bonus" not in file)


@pytest.mark.parametrize("name", ["vanilla", "gemma4"])
def test_verification_logits(name):
    trace = traces(name)[0]
    logits = verify_rounds(name, trace)
    assert error(logits, trace["target_logits"]) <= tolerance(name)


def test_threshold_trace_teacher_forced():
    """The loop verifies a fixed number of drafts, this trace 0 to 7 of them.

    Its proposals follow from our confidences, and its verdicts from our logits of
    the recorded blocks.
    """
    trace = arrays("qwen3_trained/trace_threshold_p0")
    _, _, _, proposal = draft_rounds("trained", trace)
    confidence = 1 / (1 + np.exp(-proposal.confidence.astype(np.float64)))
    below = confidence < trace["confidence_threshold"]
    proposed = np.where(below.any(1), below.argmax(1), below.shape[1])
    assert (proposed == trace["proposal_len"]).all()
    for ids, block, count in zip(
        proposal.ids, trace["verify_input_ids"], proposed, strict=True
    ):
        assert (ids[:count] == block[1 : count + 1]).all()

    logits = verify_rounds("trained", trace)
    real = np.arange(logits.shape[1])[None] <= proposed[:, None]
    assert error(logits[real], trace["target_logits"][real]) <= tolerance("trained")
    rounds, width, vocab = logits.shape
    drafts = np.concatenate([proposal.ids, np.full((rounds, 1), -1, np.int32)], 1)
    is_verify = np.arange(width)[None] < proposed[:, None]
    verdict = verify_greedy(
        logits.reshape(-1, vocab), drafts.reshape(-1), is_verify.reshape(-1)
    )
    out = publish(
        verdict.accept.reshape(rounds, width),
        verdict.token.reshape(rounds, width),
        proposal.ids,
        proposed.astype(np.int32),
        np.full((rounds, 1), -1, np.int32),
        np.full(rounds, 99, np.int32),
        np.ones(rounds, bool),
    )
    assert (out.n_accepted == trace["accepted"]).all()
    assert (out.next_token == trace["next_token"]).all()
    assert (out.emitted == trace["emitted_tokens"]).all()


@pytest.mark.parametrize(
    "file",
    [
        pytest.param("trace_sampled_T1_p0", marks=pytest.mark.slow),
        "trace_sampled_T0.7_p0",
    ],
)
def test_sampled_trace_teacher_forced(file, monkeypatch):
    """Recorded tokens and uniforms give the recorded laws and verdicts."""
    trace = arrays(f"qwen3_trained/{file}")
    spec = pair("trained").spec
    temperature = float(trace["temperature"])
    requests = requests_for(dspark.SamplingParams(temperature=temperature))

    _, _, corrected, _ = draft_rounds("trained", trace, forced=True)
    rounds, gamma, vocab = corrected.shape
    zeros = np.zeros(rounds * (gamma + 1), np.int32)
    flat = corrected.reshape(-1, vocab)
    words = np.zeros(len(flat), np.uint32)
    _, q, _ = laws.choose(spec, "sampled", flat, requests, words)
    q = np.asarray(q).reshape(corrected.shape)
    assert np.abs(q / TOTAL - trace["draft_probs"]).max() <= 1e-5

    # The law of a replacement is the row in which verification looks for its point.
    drawn_from = []

    def spy(weights, point, axis_name=None):
        drawn_from.append(np.asarray(weights))
        return np.zeros(weights.shape[0], np.int32)

    monkeypatch.setattr(reference, "locate", spy)

    def rows(x, fill):
        """[N, gamma, ...] and a fresh row, flat."""
        pad = [(0, 0), (0, 1)] + [(0, 0)] * (x.ndim - 2)
        padded = np.pad(x, pad, constant_values=fill)
        return padded.reshape(-1, *x.shape[2:])

    # A draft stands for u < p / q, which is offset < p with offset = u q.
    tokens = trace["draft_tokens"]
    taken = np.take_along_axis(q, tokens[..., None].astype(np.int64), 2)[..., 0]
    offsets = (trace["uniforms"].astype(np.float64) * taken).astype(np.int32)
    verdict = laws.verify(
        spec,
        "sampled",
        verify_rounds("trained", trace).reshape(-1, vocab),
        requests,
        zeros,
        rows(tokens, -1),
        (rows(q, 0), np.arange(len(zeros), dtype=np.int32), rows(offsets, 0)),
        rows(np.ones((rounds, gamma), bool), False),
        np.zeros(len(zeros), np.uint32),
    )
    accept = np.asarray(verdict.accept).reshape(rounds, gamma + 1)[:, :gamma]
    accepted = np.where(accept.all(1), gamma, accept.argmin(1))
    assert (accepted == trace["accepted"]).all()
    (law,) = drawn_from
    law = law.reshape(rounds, gamma + 1, vocab)[np.arange(rounds), accepted]
    law = law / law.sum(-1, keepdims=True)
    assert np.abs(law - trace["next_dist"]).max() <= 1e-5
    assert (law[np.arange(rounds), trace["next_token"]] > 0).all()
