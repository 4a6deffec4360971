"""Drafts against the reference, every round of every trace."""

import numpy as np
import pytest

from dspark_jax.models.rows import dense_rows
from tests.models.goldens import DRAFTS, arrays, error, pair, tolerance, traces
from tests.models.teacher import draft_rounds

SAMPLED = ("trace_sampled_T1_p0", "trace_sampled_T0.7_p0")


def check(name, trace, out):
    *rows, proposal = out
    # Most traces keep these of three rounds, and the tokens of all.
    kept = trace.get("kept_rounds", slice(None))
    hidden, base, corrected = (x[kept] for x in rows)
    limit = tolerance(name)
    assert error(hidden, trace["block_hidden"]) <= limit
    # Without a Markov head the stored corrected logits are the base logits.
    stored_base = trace.get("base_logits", trace["corrected_logits"])
    assert error(base, stored_base) <= limit
    assert error(corrected, trace["corrected_logits"]) <= limit
    assert (proposal.ids == trace["draft_tokens"]).all()
    assert (proposal.generation == trace["start"] + 1).all()
    if "confidence_logits" in trace:
        assert error(proposal.confidence, trace["confidence_logits"]) <= 1e-4
    else:
        assert not pair(name).spec.draft.confidence
        assert (proposal.confidence == 0).all()


@pytest.mark.parametrize("prompt", [0, 1])
@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_rounds(name, prompt):
    trace = traces(name)[prompt]
    check(name, trace, draft_rounds(name, trace))


@pytest.mark.parametrize("file", ["trace_threshold_p0", *SAMPLED])
def test_other_traces_of_the_trained_pair(file):
    trace = arrays(f"qwen3_trained/{file}")
    check("trained", trace, draft_rounds("trained", trace, file in SAMPLED))


def test_context_behind_the_anchor_or_one_too_few_is_noticed():
    trace = dict(traces("vanilla")[0])
    trace["start"] = trace["start"] - 1
    hidden, *_ = draft_rounds("vanilla", trace)
    assert error(hidden[trace["kept_rounds"]], trace["block_hidden"]) > 1e-2


@pytest.mark.parametrize("name", DRAFTS)
def test_positions_of_every_round(name):
    block = pair(name).spec.draft.block_size
    for trace in traces(name):
        start, fed = trace["start"], trace["ctx_len"]
        # Context rows of a round begin where the cache ends ...
        context = dense_rows(
            np.zeros((len(start), int(fed.max())), np.int32), fed, start - fed
        )
        first = context.position.reshape(len(start), -1)[:, 0]
        assert (first == trace["draft_pos_first"]).all()
        assert (context.start == trace["draft_cache_len_before"]).all()
        # ... the block follows them, and only the context stays.
        rows = dense_rows(np.zeros((len(start), block), np.int32), 0 * fed, start)
        last = rows.position.reshape(len(start), -1)[:, -1]
        assert (last == trace["draft_pos_last"]).all()
        assert (start == trace["draft_cache_len_after"]).all()
        assert (start[1:] == start[:-1] + fed[1:]).all()
