"""The published speeds of the gate: what follows from the printed numbers."""

import json
from fractions import Fraction as F
from pathlib import Path

import jax.numpy as jnp
import pytest

from dspark_jax.scheduling import GateConfig, gate_speed, linear_costs
from scripts.labs import gate_reported

FILE = (
    Path(__file__).parent.parent / "data" / "scheduling" / "gate_reported_tables.json"
)
DATA = json.loads(FILE.read_text())
PROMPTS = list(DATA["always_full"])
ACCEPTED = tuple(F(DATA["always_full"][name]["accepted_mean"]) for name in PROMPTS)
ROUNDS = tuple(F(DATA["always_full"][name]["rounds_inferred"]) for name in PROMPTS)
ALWAYS = tuple(F(DATA["always_full"][name]["tokens_per_second"]) for name in PROMPTS)
FULL_MS, PLAIN = F(1041), F(DATA["plain_tokens_per_second"])


def test_rounds_are_the_only_ones_that_fit():
    found = gate_reported.rounds_that_fit(ACCEPTED, 31, 94)
    assert found == [tuple(map(int, ROUNDS))]
    # One match fewer would be another split.
    assert gate_reported.rounds_that_fit(ACCEPTED, 31, 93) == [(2, 16, 5, 8)]


@pytest.mark.parametrize("name", PROMPTS)
def test_always_follows_from_the_mean(name):
    row = DATA["always_full"][name]
    accepted = F(row["accepted_mean"])
    got = gate_reported.speed(accepted, FULL_MS)
    assert got == F(row["tokens_per_second"])
    assert f"{float(got):.2f}" == row["printed"]
    assert got / PLAIN == F(row["ratio_to_plain"])
    # In forwarded tokens instead of drafts the cost would be another.
    wrong = gate_reported.speed(accepted, F(196 + 191 + 109 * 5))
    assert f"{float(wrong):.2f}" != row["printed"]


def test_costs_of_the_gate_are_those_of_the_tables():
    costs = linear_costs(5)
    p = jnp.ones((1, 5), jnp.float32)
    speeds = 1000 * gate_speed(GateConfig(skip_pays_draft=False), p, costs)[0]
    assert float(speeds[5]) == pytest.approx(float(ALWAYS[PROMPTS.index("repeat")]))
    assert float(speeds[0]) == pytest.approx(float(PLAIN))


def test_overall_is_a_harmonic_mean_by_rounds():
    overall = DATA["overall"]
    got = gate_reported.harmonic_by_rounds(ALWAYS, ROUNDS)
    assert got == F(overall["round_weighted_harmonic_always"])
    gated = tuple(F(DATA["replay"][name][2]) for name in PROMPTS)
    got = gate_reported.harmonic_by_rounds(gated, ROUNDS)
    assert got == F(overall["round_weighted_harmonic_gated"])
    # Tokens by time is above plain, and says the opposite.
    pooled = gate_reported.pooled(ACCEPTED, ROUNDS, FULL_MS)
    assert pooled == F(overall["pooled_tokens_over_time_always"])
    assert f"{float(pooled):.2f}" != overall["printed_always"]
    assert F(overall["printed_always"]) < PLAIN < pooled


def test_recovered_gap():
    gap = DATA["recovered_gap_in_ms_per_token"]
    for name, fits in (("prose", True), ("math", False)):
        plain, always, gated = map(F, DATA["replay"][name])
        got = gate_reported.recovered(plain, always, gated)
        assert got == F(gap[name])
        assert (f"{float(got):.0%}" == gap["printed"][name]) is fits


def test_rounds_without_a_match():
    zero = DATA["zero_accept_rounds"]
    lost = zero["count"] * (FULL_MS - 303)
    assert lost == zero["loss_ms"]
    assert lost / (sum(ROUNDS) * FULL_MS) == F(zero["share_of_time"])


def test_thresholded_math_is_above_what_foresight_could_reach():
    class Options:
        draft_ms, verify_base_ms, verify_slope_ms, plain_ms = 196, 300, 109, 303

    for name, accepted in zip(PROMPTS, ACCEPTED, strict=True):
        most = gate_reported.ceiling(Options, accepted)
        thresholded = F(DATA["threshold_leave_one_out"][name][1])
        assert (thresholded <= most) is (name != "math"), name
        assert F(DATA["replay"][name][2]) <= most + F(1, 100)
    ratios = [
        F(after) / F(before)
        for before, after in (DATA["threshold_leave_one_out"][name] for name in PROMPTS)
    ]
    assert (
        f"{float(sum(ratios) / 4):.2f}" == DATA["threshold_leave_one_out"]["mean_ratio"]
    )


def test_prose_gets_slower_live_but_not_in_the_replay():
    always, gated = map(F, DATA["live"]["prose"])
    assert f"{float(gated / always):.2f}" == "0.95"
    _, always, gated = map(F, DATA["replay"]["prose"])
    assert gated > always
