"""Predicted times: by hand, and the table that compiled policies read."""

import dataclasses
import json
from fractions import Fraction

import jax
import numpy as np
import pytest

from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel

FOUND = curve([2, 4, 6, 8], [8.0, 9.0, 10.0, 28.0])


def observed(slope, sampler, *, requests=3, rows=5, draft=None, model=None):
    model = model or CostModel(FOUND, draft_ms=3.0)
    for _ in range(10):
        model.observe(
            requests=requests,
            rows=rows,
            forward_ms=10.0 + slope * 6,
            sampler_ms=sampler,
            draft_ms=draft,
        )
    return model


def test_the_printed_example(data_dir):
    goldens = json.loads((data_dir / "scheduling" / "estimators.json").read_text())
    one = goldens["time_example"]
    slope = float(Fraction(one["slope"]))
    model = observed(slope, float(one["sampler"]))
    # Five rows run in the size of six, and the slope counts six.
    assert one["graph"] == 6 and one["baseline"] == 10
    assert model.round_ms(3, 5, drafts=False) == one["result"]
    residual = goldens["normalised_residual"]
    model = CostModel(curve([6], [residual["baseline_ms"]]))
    for _ in range(10):
        forward = float(residual["forward_ms"])
        model.observe(requests=1, rows=6, forward_ms=forward, sampler_ms=0.0)
    assert model.slope.value() == float(residual["result"])


def test_before_anything_was_observed():
    model = CostModel(FOUND, draft_ms=3.0)
    assert model.round_ms(2, 5) == 10 + 3
    assert model.plain_ms(2) == 8 and model.plain_ms(3) == 9


def test_what_drafting_costs_is_paid_by_rounds_that_draft():
    model = observed(0.5, 2.0)
    assert model.round_ms(3, 5) == 15 + 3
    # One row a request, in the size of four.
    assert model.plain_ms(3) == 9 + 0.5 * 4 + 2
    # Observed drafts replace the given one, by the number of requests.
    model = observed(0.5, 2.0, draft=1.25)
    observed(0.5, 2.0, requests=1, draft=7.0, model=model)
    assert model.round_ms(3, 5) == 15 + 1.25
    assert model.round_ms(1, 5) == 15 + 7


def test_the_curve_is_a_lower_bound():
    model = observed(-0.5, 2.0)
    assert model.slope.value() == -0.5
    assert model.round_ms(3, 5, drafts=False) == 12


def test_the_table_says_what_the_model_says():
    model = observed(0.5, 2.0, draft=1.25)
    observed(0.25, 4.0, requests=1, rows=6, model=model)
    table = model.table(4)

    @jax.jit
    def read(table, requests, rows):
        return (
            table.round_ms(requests, rows),
            table.round_ms(requests, rows, drafts=False),
            table.plain_ms(requests),
            table.ms_by_total(requests, 10),
        )

    for requests in range(1, 5):
        for rows in range(requests, 9):
            drafts, bare, plain, by_total = read(table, requests, rows)
            assert drafts == np.float32(model.round_ms(requests, rows))
            assert bare == np.float32(model.round_ms(requests, rows, drafts=False))
            assert plain == np.float32(model.plain_ms(requests))
            assert by_total[rows] == drafts
        assert by_total[9] == read(table, requests, 9)[0] == np.inf
    # A snapshot: later rounds do not move it, nor need another program.
    before = float(read(table, 3, 5)[0])
    observed(4.0, 9.0, rows=4, model=model)
    assert float(read(table, 3, 5)[0]) == before
    assert float(read(model.table(4), 3, 5)[0]) > before
    assert read._cache_size() == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.slope = 0.0


def test_bad_input():
    for ms in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="`draft_ms`"):
            CostModel(FOUND, draft_ms=ms)
        for name in ("forward_ms", "sampler_ms", "draft_ms"):
            good = {"forward_ms": 1.0, "sampler_ms": 1.0, "draft_ms": 1.0}
            with pytest.raises(ValueError, match=f"`{name}`"):
                CostModel(FOUND).observe(requests=1, rows=2, **good | {name: ms})
    model = CostModel(FOUND)
    with pytest.raises(ValueError, match="`rows`.*largest size"):
        model.observe(requests=1, rows=9, forward_ms=1.0, sampler_ms=1.0)
    with pytest.raises(ValueError, match="`rows`.*0..8"):
        model.round_ms(1, 9)
    with pytest.raises(ValueError, match="`rows`"):
        model.plain_ms(9)
