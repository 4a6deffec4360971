"""Costs of a round, and how often to try again what was switched off."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling import (
    fit_verification,
    is_probe,
    linear_costs,
    measured_costs,
    probe_period,
)

FOLDER = Path(__file__).parent.parent / "data" / "scheduling"


def test_probes_cost_at_most_their_share():
    costs = linear_costs(5)
    for drafts in range(1, 6):
        extra = 196 + 300 + 109 * drafts - 303
        period = probe_period(costs, drafts).item()
        assert extra <= 0.01 * period * 303 and extra > 0.01 * (period - 1) * 303
        counter = jnp.arange(5000)
        probes = np.cumsum(np.asarray(is_probe(counter, period)))
        # At every moment, and it does come back.
        spent = probes * extra
        assert np.all(spent <= 0.01 * 303 * np.arange(1, 5001)) and probes[-1] >= 10
        # One round earlier the share would not hold at the first probe.
        early = np.cumsum(np.asarray(is_probe(counter, period - 1))) * extra
        assert np.any(early > 0.01 * 303 * np.arange(1, 5001))
    assert probe_period(measured_costs(0.0, [1.0], 1.0), 1).item() == 1
    assert probe_period(measured_costs(1.0, [1e30], 1e-30), 1).item() == 2**30


def test_fit_counts_forwarded_tokens():
    fit = json.loads((FOLDER / "gate_reported_tables.json").read_text())["verify_fit"]
    base, slope = fit_verification(fit["forwarded_tokens"], fit["measured_ms"])
    assert (round(base, 9), round(slope, 9)) == (300, 109)
    line = fit["least_squares_in_forwarded_tokens"]
    assert base - slope == pytest.approx(float(line["intercept"]))
    with pytest.raises(ValueError, match="`forwarded`"):
        fit_verification([2, 2], [1.0, 2.0])


def test_costs_and_periods_are_checked():
    with pytest.raises(ValueError, match="`plain_ms` is 0"):
        measured_costs(1.0, [1.0], 0.0)
    with pytest.raises(ValueError, match="`verify_ms` is nan"):
        measured_costs(1.0, [1.0, float("nan")], 1.0)
    with pytest.raises(ValueError, match="`drafts` is 2"):
        probe_period(linear_costs(1), 2)
    with pytest.raises(ValueError, match="`share` is 0"):
        probe_period(linear_costs(1), 1, 0.0)
