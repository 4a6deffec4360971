"""Field reports about statistics, near ties and ids that do not exist."""

import dataclasses

import jax
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.state import LENGTH
from dspark_jax.evaluation.divergence import Divergence, judge, top2_margins
from dspark_jax.transcript import Transcript
from tests.decoding.scripts import chain_model, generate, line, stopping_at, table
from tests.decoding.serving import requests_for
from tests.models.goldens import arrays, pair, right_padded
from tests.models.quick import quick_jit


def test_fr18_exact_tie_gives_the_lowest_id_on_both_paths():
    tied = table(line(1, 2, 3, 4, 5), 16)
    # Equal rows of the output head: ids 3 and 7 tie after 2.
    tied[:, 7] = tied[:, 3]
    model = dspark.testing.scripted_model(tied, tied, gamma=2)
    head = model.params["target"]["lm_head"]["weight"]
    assert (head[3] == head[7]).all()
    out = generate(model, [[1]], [stopping_at()], max_new_tokens=4, draft_length=0)
    assert out.tokens[0].tolist() == [2, 3, 4, 5]
    # A draft that proposes the other one of the two is not accepted.
    other = table({**line(1, 2, 3, 4, 5), 2: 7}, 16)
    model = dspark.testing.scripted_model(tied, other, gamma=2)
    out = generate(model, [[1]], [stopping_at()], max_new_tokens=4)
    assert out.tokens[0].tolist() == [2, 3, 4, 5]
    # Round 1 rejects, round 2 keeps both.
    assert out.counters.rounds[0] == 2 and out.counters.kept[0].tolist() == [1, 1]
    # Behind the tie the margin is zero, elsewhere it is clear.
    tokens, lengths = right_padded([[1, 2, 3]])
    run = quick_jit(lambda params: top2_margins(model.spec, params, tokens, lengths))
    first, second, third = np.asarray(run(model.params))[0]
    assert second == 0 and first > 1 and third > 1


def test_fr18_verdicts():
    margins = [2.0, 9e-4, 1.1e-3, 5.0]
    plain = [4, 5, 6, 7]
    assert judge(plain, plain, margins) == Divergence("same")
    tie = judge(plain, [4, 9, 0, 0], margins)
    assert tie == Divergence("near_tie", 1, (5, 9), 9e-4)
    # What follows a tie is not judged, but what comes before it is.
    assert judge(plain, [8, 9, 0, 0], margins).verdict == "mismatch"
    fault = judge(plain, [4, 5, 9, 7], margins)
    assert fault == Divergence("mismatch", 2, (6, 9), 1.1e-3)
    assert judge(plain, [4, 5, 9, 7], margins, near_tie=0.01).verdict == "near_tie"
    assert judge(plain, plain[:3], margins) == Divergence("mismatch", 3, (7, None))
    with pytest.raises(ValueError, match="3 entries for 4 tokens"):
        judge(plain, plain, margins[:3])


def test_fr18_margins_of_the_reference():
    data = arrays("qwen3_rand/target_fwd")
    model = pair("vanilla")
    lines = [data["p0_greedy"], data["p1_greedy"]]
    tokens, lengths = right_padded(lines)
    run = quick_jit(lambda params, *rest: top2_margins(model.spec, params, *rest))
    margins = np.asarray(run(model.params, tokens, lengths))
    for i, ids in enumerate(lines):
        prompt = len(data[f"p{i}_ids"])
        own = margins[i, prompt - 1 : len(ids) - 1]
        assert abs(own.min() - data[f"p{i}_greedy_min_margin"]) < 1e-4
        assert np.isinf(margins[i, len(ids) :]).all()


def test_fr45_padding_ids_are_never_emitted():
    real, vocab = 13, 16
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, vocab, vocab)).astype(np.float32)
    logits[:, :, real:] = 10.0
    model = dspark.testing.scripted_model(*logits, gamma=3)
    temperatures = [0.0, 0.5, 5.0, 100.0] * 8
    seeds = np.arange(2 * len(temperatures), dtype=np.uint32).reshape(-1, 2)
    sampling = [dspark.SamplingParams(temperature=t) for t in temperatures]
    requests = requests_for(*sampling, seeds=seeds)
    tokens, lengths = right_padded([[1], [5], [9], [12]] * 8)

    def run(valid):
        target = dataclasses.replace(model.spec.target, valid_vocab=valid)
        draft = model.spec.draft
        backbone = dataclasses.replace(draft.backbone, valid_vocab=valid)
        draft = dataclasses.replace(draft, backbone=backbone)
        program = quick_jit(
            lambda params: dspark.generate_tokens(
                dspark.Spec(target, draft), params, tokens, lengths,
                requests=requests, variant="sampled", max_new_tokens=12,
            )
        )  # fmt: skip
        return np.asarray(program(model.params).tokens)

    tokens_of_real_ids = run(real)
    assert tokens_of_real_ids.min() >= 0 and tokens_of_real_ids.max() < real
    # Control: without the limit the padding rows would win; of rows at temperature
    # 100, which are all but flat, one in twelve misses them in twelve tokens.
    padded = (run(None) >= real).any(axis=1)
    assert padded[np.asarray(temperatures) < 100].all() and padded.mean() > 0.9


def test_fr55_mean_length_is_over_all_rounds():
    # The draft is wrong after 1 and after 6, so rounds emit 1, 4 and 1 tokens.
    model = chain_model(line(0, 1, 2, 3, 4, 5, 6, 7, 8), {1: 9, 6: 9}, gamma=3)
    out = generate(model, [[0]], [stopping_at()], max_new_tokens=7)
    assert out.tokens[0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    counters = jax.tree.map(lambda x: x[0], out.counters)
    assert (counters.rounds, counters.generated) == (3, 7)
    assert counters.kept.tolist() == [1, 1, 1]
    assert counters.proposed.tolist() == [3, 3, 3]
    assert counters.drafted == 9 and counters.verified_rows == 12


def test_fr55_statistics_of_a_transcript():
    transcript = Transcript(dspark.testing.byte_tokenizer(), (), 3)
    transcript.take([10], 0, 0, [], 0, prefill=True)
    for emitted, kept, finish in (([1], 0, 0), ([2, 3, 4, 5], 3, 0), ([6], 0, LENGTH)):
        transcript.take(emitted, kept, 3, [], finish, prefill=False)
    stats = transcript.stats(
        seconds=2.0, compile_seconds=0.0, programs=0, implementation="reference"
    )
    assert stats.accepted_length == 2.0
    assert stats.acceptance == (1 / 3, 1 / 3, 1 / 3)
    assert (stats.rounds, stats.generated, stats.drafted) == (3, 7, 9)
    assert stats.tokens_per_second == 3.0


def test_fr56_last_round_counts_what_was_committed():
    # The block d1, d2, end, d4, d5 and the token after it all match.
    model = chain_model(line(1, 2, 3, 4, 5, 6, 7, 8, 9), gamma=5)
    end = 5
    out = generate(model, [[1]], [stopping_at(end)], max_new_tokens=20)
    assert out.tokens[0, : out.lengths[0]].tolist() == [2, 3, 4, end]
    counters = jax.tree.map(lambda x: x[0], out.counters)
    assert counters.generated == out.lengths[0] == 4
    committed = counters.generated - 1
    assert (counters.rounds, committed) == (1, 3)
    assert counters.kept.tolist() == [1, 1, 1, 0, 0]


def test_fr56_limit_inside_a_block():
    model = chain_model(line(1, 2, 3, 4, 5, 6, 7, 8, 9))
    out = generate(model, [[1]], [stopping_at()], max_new_tokens=3)
    assert out.tokens[0].tolist() == [2, 3, 4] and out.finish[0] == LENGTH
    assert out.counters.kept[0].sum() == 2 and out.counters.generated[0] == 3
    assert out.lengths.tolist() == [3]


def test_a_request_that_ended_counts_no_more():
    """Its rows are still in the batch while the others run on."""
    model = chain_model(line(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), gamma=4)
    sampling = [stopping_at(4), stopping_at()]
    out = generate(model, [[1], [1]], sampling, max_new_tokens=11)
    counters = out.counters
    assert counters.rounds.tolist() == [1, 2]
    assert counters.generated.tolist() == [3, 11]
    assert counters.drafted.tolist() == [4, 8]
    assert counters.verified_rows.tolist() == [5, 10]
    assert counters.proposed.tolist() == [[1] * 4, [2] * 4]
    assert counters.kept.tolist() == [[1, 1, 0, 0], [2] * 4]


def test_logprobs_of_the_one_program_are_the_targets_own():
    """Of every token at its own place, with drafts that stand and that fall."""
    rng = np.random.default_rng(0)
    table, noise = rng.normal(size=(2, 16, 16)).astype(np.float32)
    model = dspark.testing.scripted_model(table, table + noise, gamma=2)
    prompts = [[1], [5, 3], [9], [2, 12]]
    tokens, lengths = right_padded(prompts)
    sampling = [
        dspark.SamplingParams(),
        dspark.SamplingParams(temperature=1.0),
        dspark.SamplingParams(temperature=0.5),
        dspark.SamplingParams(temperature=2.0, stop_ids=tuple(range(4))),
    ]
    seeds = np.arange(8, dtype=np.uint32).reshape(4, 2)
    requests = requests_for(*sampling, seeds=seeds)
    run = quick_jit(
        lambda params: dspark.generate_tokens(
            model.spec, params, tokens, lengths, requests=requests,
            variant="sampled", max_new_tokens=12, logprobs=True,
        )
    )  # fmt: skip
    out = jax.tree.map(np.asarray, run(model.params))
    assert 0 < out.counters.kept.sum() < out.counters.proposed.sum()
    # The temperature does not enter.
    law = np.asarray(jax.nn.log_softmax(table))
    assert out.lengths.min() < 12
    assert (out.logprobs[out.tokens < 0] == 0).all()
    for row, length in enumerate(out.lengths):
        ids = out.tokens[row, :length]
        before = [prompts[row][-1], *ids[:-1]]
        expected = [law[pair] for pair in zip(before, ids, strict=True)]
        np.testing.assert_allclose(out.logprobs[row, :length], expected, atol=1e-4)


def test_what_a_stop_string_cuts_off_counts_nowhere():
    transcript = Transcript(dspark.testing.byte_tokenizer(), ("b",), 3)
    transcript.take(list(b"x"), 0, 0, [-1.0], 0, prefill=True)
    logs = [-2.0, -3.0, -4.0, -5.0]
    transcript.take(list(b"abcd"), 3, 3, logs, 0, prefill=False)
    assert bytes(transcript.tokens) == b"xab" and transcript.dropped == 2
    assert transcript.logprobs == [-1.0, -2.0, -3.0]
    stats = transcript.stats(
        seconds=1.0, compile_seconds=0.0, programs=0, implementation="reference"
    )
    assert stats.acceptance == (1, 1, 0) and stats.accepted_length == 2


def test_a_character_that_the_last_token_leaves_open_is_shown():
    transcript = Transcript(dspark.testing.byte_tokenizer(), (), 3)
    assert transcript.take([120], 0, 0, [], 0, prefill=True) == "x"
    # Three of the four bytes of a character.
    shown = transcript.take([0xF0, 0x9F, 0x98], 2, 2, [], LENGTH, prefill=False)
    assert shown == "\ufffd" and transcript.text == "x\ufffd"
