"""Allocation by rank, against reference files and an exhaustive search."""

import itertools
import json
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.allocate import allocate, carried, survival

FOLDER = Path(__file__).parent.parent / "data" / "scheduling"
run = jax.jit(allocate)


def load(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def floats(rows):
    return jnp.asarray([[float(Fraction(x)) for x in row] for row in rows], jnp.float32)


def test_rank_allocation_golden():
    data = load("gpu_rank_allocation")
    cases = [*data["source_example"], *data["cases"]]
    assert len(cases) == 43
    for case in cases:
        alive = survival(floats(case["prev_confidence"]))
        values = carried(alive, jnp.asarray(case["remap"], jnp.int32))
        if "cumulative" in case:
            np.testing.assert_allclose(values, floats(case["cumulative"]), rtol=3e-7)
        got = run(values, case["total"])
        assert got.tolist() == case["q"], case


def test_ties_go_by_request_and_then_by_position():
    data = load("allocation_order_contrast")
    values = floats(data["cumulative"])
    got = run(values, len(values) + data["extra"])
    assert got.tolist() == data["request_index_then_prefix"]
    assert got.tolist() != data["value_position_request"]
    zero = data["zero_rows"]
    values = floats(zero["cumulative"])
    assert run(values, len(values) + zero["extra"]).tolist() == zero["rank_count"]


def test_no_other_prefixes_are_worth_more(rng):
    for _ in range(20):
        confidence = jnp.asarray(rng.random((3, 3)), jnp.float32)
        values = np.asarray(survival(confidence))
        for total in range(3, 13):
            rows = np.asarray(run(jnp.asarray(values), total))
            assert rows.sum() == total and rows.min() >= 1 and rows.max() <= 4

            def worth(counts, values=values):
                return sum(
                    values[i, : c - 1].astype(np.float64).sum()
                    for i, c in enumerate(counts)
                )

            best = max(
                worth(counts)
                for counts in itertools.product(range(1, 5), repeat=3)
                if sum(counts) == total
            )
            assert abs(worth(rows) - best) < 1e-6


def test_totals_outside_of_the_range():
    values = survival(jnp.full((2, 3), 0.5, jnp.float32))
    assert run(values, 0).tolist() == [1, 1]
    assert run(values, 99).tolist() == [4, 4]


def test_order_of_requests_does_not_matter_without_ties(rng):
    values = survival(jnp.asarray(rng.random((8, 5)), jnp.float32))
    order = rng.permutation(8)
    rows = np.asarray(run(values, 27))
    np.testing.assert_array_equal(run(values[order], 27), rows[order])


def test_values_are_checked():
    with pytest.raises(ValueError, match=r"must be float32\[B, n\]"):
        allocate(jnp.zeros((3,), jnp.float32), 3)
    with pytest.raises(ValueError, match="`confidence` is int32"):
        survival(jnp.zeros((2, 2), jnp.int32))
