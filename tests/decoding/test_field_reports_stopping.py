"""Field reports about stopping, budgets and the length of what is returned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.state import CACHE_FULL, LENGTH, RUNNING, STOP
from tests.decoding.scripts import chain_model, generate, line, stopping_at
from tests.decoding.serving import no_words, quick_prefill, quick_round, requests_for
from tests.models.goldens import right_padded
from tests.models.quick import quick_jit


def test_fr09_stop_inside_an_accepted_block():
    # A cycle, so that some of the stop ids occur more than once.
    chain = line(1, 2, 3, 4, 2) | {4: 5} | line(5, 6, 7, 8, 9, 10, 11, 3)
    model = chain_model(chain, {6: 1})
    plain = generate(model, [[1]], [stopping_at()], max_new_tokens=12, draft_length=0)
    plain = plain.tokens[0].tolist()
    ends = [plain[k - 1] for k in range(1, 9)]
    out = generate(
        model, [[1]] * 8, [stopping_at(end) for end in ends], max_new_tokens=12
    )
    for row, end in enumerate(ends):
        wanted = plain[: plain.index(end) + 1]
        assert out.tokens[row, : out.lengths[row]].tolist() == wanted
        assert (out.tokens[row, out.lengths[row] :] == -1).all()
        assert out.finish[row] == STOP
    assert (out.counters.kept.sum(0) > 0).all()


def test_fr10_rejected_stop_id_does_not_stop():
    end = 12
    # The target goes 4, 5, 9, 10, 11; the draft says 5, end, 6 after 4.
    model = chain_model(line(4, 5, 9, 10, 11, 13, 14), {5: end, end: 6, 9: 10})
    requests = requests_for(stopping_at(end))
    tokens, lengths = right_padded([[3, 4]])
    model_args = (model.spec, model.params)
    budget = jnp.asarray([9], jnp.int32)
    # The prompt ends with 3, 4, so the first token is 5, and end is drafted next.
    state, _ = quick_prefill(
        *model_args, tokens, lengths, budget, requests, no_words(1, 3), n=3,
        variant="greedy", capacity=16,
    )  # fmt: skip
    assert state.proposal.ids.tolist() == [[end, 6, 0]]
    state, out = quick_round(*model_args, state, requests, no_words(1, 3), 3, "greedy")
    assert out.emitted.tolist() == [[9, -1, -1, -1]]
    assert int(out.finish[0]) == RUNNING and int(out.n_kept[0]) == 0
    assert int(state.anchor[0]) == 9
    assert state.proposal.ids.tolist() == [[10, 11, 13]]


def test_fr11_token_of_the_prefill_is_returned_and_may_stop():
    model = chain_model(line(2, 9, 8, 7, 6))
    out = generate(
        model, [[1, 2]] * 2, [stopping_at(), stopping_at(9)], max_new_tokens=3
    )
    assert out.tokens.tolist() == [[9, 8, 7], [9, -1, -1]]
    assert out.finish.tolist() == [LENGTH, STOP]
    assert out.counters.rounds.tolist() == [1, 0]


def test_fr12_stop_string_inside_an_accepted_block(bytes_model):
    options = dict(chat=False, draft_length=3)
    out = dspark.generate(bytes_model, "p", stop="ab", max_new_tokens=9, **options)
    assert out.text == "x" and out.finish_reason == "stop_string"
    # The block was a, b, c and d; what completed the stop string is kept.
    assert bytes(out.tokens) == b"xab"
    assert bytes(out.state.tokens) == b"pxab"
    assert out.stats.generated == 3

    sampling = dspark.SamplingParams(temperature=1.0, seed=5)
    again = dict(sampling=sampling, max_new_tokens=6, chat=False)
    plain = dspark.generate(bytes_model, "pxab", draft_length=0, **again)
    fresh = dspark.generate(bytes_model, "pxab", draft_length=3, **again)
    onward = dspark.generate(bytes_model, "", state=out.state, draft_length=3, **again)
    # The same point, seed and drafts give the same tokens; plain decoding draws
    # the first one from the same word.
    assert onward.tokens == fresh.tokens
    assert onward.tokens[0] == plain.tokens[0]
    # Control: the point matters.
    other = dspark.generate(bytes_model, "pxabc", draft_length=3, **again)
    assert other.tokens != fresh.tokens


def test_fr13_counters_end_with_the_stop_id(bytes_model):
    stop = dspark.SamplingParams(stop_ids=(ord("b"),))
    out = dspark.generate(
        bytes_model, "p", sampling=stop, max_new_tokens=9, chat=False, draft_length=3
    )
    # x belongs to the prefill; the block a, b, c and d matched entirely.
    assert bytes(out.tokens) == b"xab" and out.finish_reason == "stop"
    assert out.text == "xa"
    stats = out.stats
    assert (stats.rounds, stats.generated) == (1, 3)
    assert stats.accepted_length == 2
    assert [share * stats.rounds for share in stats.acceptance] == [1, 1, 0]


def test_fr13_device_counters_end_with_the_stop_id():
    model = chain_model(line(1, 2, 3, 4, 5, 6, 7))
    out = generate(model, [[1]], [stopping_at(4)], max_new_tokens=12)
    assert out.tokens[0, :4].tolist() == [2, 3, 4, -1]
    counters = out.counters
    assert (counters.rounds[0], counters.generated[0]) == (1, 3)
    assert counters.kept[0].tolist() == [1, 1, 0, 0]


def test_fr14_full_cache_is_said_and_last_slots_are_right():
    model = dspark.testing.tiny_model("qwen3", seed=2)
    prompt = [np.random.default_rng(1).integers(0, 250, 60).tolist()]
    tight, wide = (
        generate(model, prompt, [stopping_at()], max_new_tokens=10, capacity=capacity)
        for capacity in (64, 128)
    )
    assert tight.lengths.tolist() == [4] and tight.finish.tolist() == [CACHE_FULL]
    assert wide.lengths.tolist() == [10] and wide.finish.tolist() == [LENGTH]
    assert tight.tokens[0, :4].tolist() == wide.tokens[0, :4].tolist()


def test_one_token_may_end_a_request_for_several_reasons():
    """A stop id is named first, then the limit, then the cache."""
    model = chain_model(line(1, 2, 3, 4, 5, 6, 7, 8, 9))
    # Room for five tokens after two, and for six after one; six are allowed.
    prompts, ends = [[0, 1], [0, 1], [1], [1]], [(), (6,), (), (7,)]
    sampling = [stopping_at(*ids) for ids in ends]
    out = generate(model, prompts, sampling, max_new_tokens=6, capacity=7)
    assert out.lengths.tolist() == [5, 5, 6, 6]
    assert out.finish.tolist() == [CACHE_FULL, STOP, LENGTH, STOP]


def test_the_token_of_the_prefill_needs_one_position():
    """It is committed, but not in the cache."""
    model = chain_model(line(1, 2, 3, 4, 5, 6))
    out = generate(
        model, [[1], [0, 1]], [stopping_at()] * 2, max_new_tokens=9, capacity=3
    )
    assert out.lengths.tolist() == [2, 1]
    assert out.finish.tolist() == [CACHE_FULL] * 2
    assert out.counters.rounds.tolist() == [1, 0]


def test_fr14_full_cache_as_text(bytes_model):
    options = dict(chat=False, draft_length=3, max_new_tokens=10, capacity=128)
    out = dspark.generate(bytes_model, "p" * 124, **options)
    assert len(out.tokens) == 4 and out.finish_reason == "cache_full"
    with pytest.raises(dspark.CacheFull, match="128"):
        dspark.generate(bytes_model, "p" * 128, **options)


def test_an_ended_request_rests_while_others_run_on():
    """Nothing of its state moves: a next turn may go on from it."""
    model = chain_model(line(1, 2, 3, 4, 5, 6, 7, 8, 9))
    requests = requests_for(stopping_at(2), stopping_at())
    tokens, lengths = right_padded([[1], [1]])
    args, budget = (model.spec, model.params), jnp.full((2,), 9, jnp.int32)
    begun, out = quick_prefill(
        *args, tokens, lengths, budget, requests, no_words(2, 3), n=3,
        variant="greedy", capacity=16,
    )  # fmt: skip
    assert out.finish.tolist() == [STOP, RUNNING]
    state, out = quick_round(*args, begun, requests, no_words(2, 3), 3, "greedy")
    assert out.n_emitted.tolist() == [0, 4] and out.finish.tolist() == [STOP, RUNNING]
    for name in ("anchor", "length", "budget", "finish", "counters"):
        pairs = zip(
            jax.tree.leaves(getattr(begun, name)),
            jax.tree.leaves(getattr(state, name)),
            strict=True,
        )
        for before, after in pairs:
            assert (before[0] == after[0]).all(), name
    assert state.length.tolist() == [1, 5] and state.anchor.tolist() == [2, 6]


def test_stop_ids_are_the_requests_own():
    """A stop id of one request stops no other."""
    model = chain_model(line(1, 2, 3, 4, 5, 6))
    out = generate(
        model, [[1], [1]], [stopping_at(3), stopping_at(5)], max_new_tokens=9
    )
    assert out.lengths.tolist() == [2, 4]
    spec = dataclasses.replace(
        model.spec, target=dataclasses.replace(model.spec.target, eos_ids=(4,))
    )
    tokens, lengths = right_padded([[1]])
    run = quick_jit(
        lambda params: dspark.generate_tokens(
            spec, params, tokens, lengths, max_new_tokens=9
        )
    )
    assert run(model.params).lengths.tolist() == [3]
