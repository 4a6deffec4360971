"""The gate against its reference files, and what the causal form may look at."""

import json
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling import (
    GateConfig,
    GateState,
    gate_decide,
    gate_decide_causal,
    gate_mean_rate,
    gate_rates,
    gate_speed,
    gate_start,
    gate_update,
    linear_costs,
    margin_gate,
    measured_costs,
    threshold_lengths,
)

FOLDER = Path(__file__).parent.parent / "data" / "scheduling"
SUNK, PUBLISHED = GateConfig(), GateConfig(skip_pays_draft=False)
decide = jax.jit(gate_decide, static_argnums=0)
decide_causal = jax.jit(gate_decide_causal, static_argnums=0)
update = jax.jit(gate_update, static_argnums=0)
speed = jax.jit(gate_speed, static_argnums=0)
rates_of = jax.jit(gate_rates, static_argnums=0)


def load(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def floats(values):
    return np.asarray([float(Fraction(v)) for v in values], np.float32)


@pytest.fixture(scope="module")
def data():
    return load("gate_decisions")


@pytest.fixture(scope="module")
def blocks(data):
    """All 6^5 blocks of buckets: float32[7776, 5], and their reference decisions."""
    rates = floats(data["p_by_bucket"])
    index = np.indices((6,) * 5).reshape(5, -1).T
    return jnp.asarray(rates[index]), np.load(FOLDER / data["all_vectors_file"])


def test_decisions_of_the_reference_file(data):
    rate = floats(data["p_by_bucket"])
    assert len(data["cases"]) == 59
    for drafts in {len(case["buckets"]) for case in data["cases"]}:
        cases = [case for case in data["cases"] if len(case["buckets"]) == drafts]
        costs = linear_costs(drafts)
        buckets = np.asarray([case["buckets"] for case in cases], int)
        p = jnp.asarray(rate[buckets].reshape(len(cases), drafts))
        for name, config in (
            ("decision", PUBLISHED),
            ("decision_when_skip_pays_draft", SUNK),
        ):
            got = decide(config, p, costs)
            assert got.tolist() == [case[name] for case in cases], (name, drafts)
        if drafts < 5:
            continue
        spent = np.asarray([303, *(496 + 109 * n for n in range(1, 6))], np.float32)
        tokens = np.asarray(speed(PUBLISHED, p, costs)) * spent
        want = [floats(case["expected_tokens"]) for case in cases]
        np.testing.assert_allclose(tokens, want, rtol=1e-6)


def test_buckets_of_the_reference_file(data):
    logits = sum((case["confidence"] for case in data["cases"]), [])
    # A state in which the rate of each bucket is its number.
    marks = jnp.asarray([[-1.0, 0.0, 1.0, 2.0, 3.0, 4.0]], jnp.float32)
    state = GateState(marks, jnp.zeros_like(marks))
    found = rates_of(SUNK, state, jnp.asarray([logits], jnp.float32))[0]
    assert found.tolist() == sum((case["buckets"] for case in data["cases"]), [])
    assert found.size == 279 and {-0.5, 0.5, 1.5, 3.0, 6.0} <= set(logits)


def test_floors_of_the_reference_file(data):
    rate = floats(data["p_by_bucket"])
    groups = {}
    for case in data["cases"]:
        floor, name = case.get("floor", 1), "decision_with_floor_1"
        want = case["decision_with_that_floor" if "floor" in case else name]
        groups.setdefault((floor, len(case["buckets"])), []).append((case, want))
    checked = 0
    for (floor, drafts), cases in groups.items():
        if drafts != 5:
            continue
        p = jnp.asarray(rate[np.asarray([case["buckets"] for case, _ in cases])])
        config = GateConfig(skip_pays_draft=False, floor=floor)
        got = decide(config, p, linear_costs(5))
        assert got.tolist() == [want for _, want in cases], floor
        checked += len(cases)
        free = [case["decision"] for case, _ in cases]
        assert floor == 0 or got.tolist() != free
    assert checked == 55


def test_all_blocks_of_buckets(blocks, data):
    p, reference = blocks
    costs = linear_costs(5)
    for config, name in (
        (PUBLISHED, "decision"),
        (SUNK, "decision_when_skip_pays_draft"),
    ):
        got = np.asarray(decide(config, p, costs)).reshape((6,) * 5)
        np.testing.assert_array_equal(got, reference[name])
    # Without a margin the whole block is no better than others.
    bare = GateConfig(skip_pays_draft=False, margin=1.0)
    fastest = np.asarray(decide(bare, p, costs)).reshape((6,) * 5)
    np.testing.assert_array_equal(fastest, reference["argmax"])
    assert (fastest != reference["decision"]).sum() > 500
    counts = np.bincount(reference["decision"].ravel(), minlength=6)
    assert counts.tolist() == [
        data["decision_histogram"].get(str(n), 0) for n in range(6)
    ]


def test_sweep_of_one_rate(data):
    rows = data["uniform_p_sweep"]
    p = jnp.asarray(np.repeat(floats([r[0] for r in rows])[:, None], 5, 1))
    costs = linear_costs(5)
    tokens = speed(PUBLISHED, p, costs)[:, 5] * 1041
    np.testing.assert_allclose(tokens, floats([r[1] for r in rows]), rtol=1e-6)
    for column, config in (
        (2, GateConfig(skip_pays_draft=False, margin=1.0)),
        (3, PUBLISHED),
        (4, GateConfig(margin=1.0)),
        (5, SUNK),
    ):
        got = decide(config, p, costs)
        assert got.tolist() == [r[column] for r in rows], column


def test_equality_with_the_margin_keeps_the_block(data):
    p = float(Fraction(data["margin_equality"]["p"]))
    costs = linear_costs(1)
    for shift, want in ((0.0, 1), (-1e-4, 0), (1e-4, 1)):
        got = decide(PUBLISHED, jnp.full((1, 1), p + shift, jnp.float32), costs)
        assert got.item() == want, shift


def test_equal_speeds_choose_the_shortest(rng):
    """2 tokens in 2 c ms are 1 in c ms, whatever c and rounding are."""
    p = jnp.asarray([[1.0, 1.0, 0.0]], jnp.float32)
    longer = 0
    for c in rng.uniform(0.1, 10, 30).astype(np.float32):
        costs = measured_costs(0.0, [2 * c, 3 * c, 100 * c], float(c))
        assert decide(SUNK, p, costs).item() == 0
        longer += int(np.argmax(speed(SUNK, p, costs)[0])) != 0
    # Taken as they are, the floats of some say otherwise.
    assert longer > 0


def test_break_even(data):
    even = data["break_even"]
    costs = linear_costs(5)
    for n, cost, tokens in even["per_length"]:
        assert costs.draft_ms + costs.verify_ms[n] == float(Fraction(cost))
        assert Fraction(cost) / even["cost_plain"] == Fraction(tokens)


def test_pre_draft_margin(data):
    for case in data["pre_draft_margin_gate"]:
        distance = jnp.asarray([case["top1_minus_top2"]], jnp.float32)
        draft = margin_gate(distance, case["threshold"])
        assert draft.tolist() == [not case["skip_draft"]], case


def replay(steps):
    """The steps of a reference sequence and the state after each of two requests.

    The second request takes no part; it has counts of its own.
    """
    apart = jnp.asarray([[0.0] * 6, [2.0] * 6], jnp.float32)
    state = GateState(apart / 2.0, apart)
    for step in steps:
        state = update(
            SUNK,
            state,
            jnp.asarray([step["confidence"]] * 2, jnp.float32),
            jnp.full(2, step["verified"], jnp.int32),
            jnp.full(2, step["accepted"], jnp.int32),
            jnp.asarray([True, False]),
        )
        yield step, state


def test_updates_of_the_reference_file():
    sequences = load("gate_updates")["sequences"]
    assert sum(map(len, sequences.values())) == 24
    for steps in sequences.values():
        for step, state in replay(steps):
            np.testing.assert_allclose(state.hits[0], floats(step["hits"]), rtol=1e-6)
            totals = floats(step["totals"])
            np.testing.assert_allclose(state.totals[0], totals, rtol=1e-6)
            middles = jnp.asarray([[-1.0, 0.0, 1.0, 2.0, 4.0, 7.0]] * 2, jnp.float32)
            rates = rates_of(SUNK, state, middles)
            want = floats(step["estimate_with_one_pseudo_hit"])
            np.testing.assert_allclose(rates[0], want, rtol=1e-6)
            # A request that takes no part stays as it is.
            assert np.all(state.hits[1] == 1) and np.all(state.totals[1] == 2)


def test_what_is_behind_the_miss_does_not_count():
    data = load("gate_updates")
    everything = data["what_uncensored_counting_would_record_for_sequence_censoring"]
    steps = data["sequences"]["censoring"]
    for (step, state), all_five in zip(replay(steps), everything, strict=True):
        known = step["observed"]
        assert [hit for *_, hit in known] == all_five[: len(known)]
        if len(known) < 5:
            # Five outcomes a round would have brought the total above this.
            assert state.totals[0, 5] < 5


def test_a_cold_gate_takes_the_block_and_a_skipping_one_recovers():
    costs = linear_costs(5)
    state = gate_start(SUNK, 1)
    logits = jnp.full((1, 5), -2.0, jnp.float32)
    assert decide(SUNK, rates_of(SUNK, state, logits), costs).item() == 5
    one, none = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32)
    active = jnp.ones(1, bool)
    for _ in range(8):
        state = update(SUNK, state, logits, one * 5, none, active)
    assert decide(SUNK, rates_of(SUNK, state, logits), costs).item() == 0
    rounds = 0
    while decide(SUNK, rates_of(SUNK, state, logits), costs).item() == 0:
        state = update(SUNK, state, logits, none, none, active)
        rounds += 1
    assert 3 < rounds < 60


def looks_ahead(lengths):
    """Whether some position is in or out for what later confidences say.

    Args:
      lengths: int[6, 6, 6, 6, 6], by the buckets of the five confidences.
    """
    for j in range(1, 6):
        taken = lengths >= j
        alone = taken[(...,) + (slice(0, 1),) * (5 - j)]
        if np.any(taken != alone):
            return True
    return False


@pytest.mark.parametrize("margin", [1.0, 1.15])
def test_causal_gate_takes_a_draft_for_what_came_before_it(blocks, margin):
    p, reference = blocks
    costs = linear_costs(5)
    seen = set()
    for sunk in (True, False):
        config = GateConfig(margin=margin, skip_pays_draft=sunk)
        for ahead in (0.0, 0.6, 0.8, 1.0):
            view = jnp.full(len(p), ahead, jnp.float32)
            lengths = decide_causal(config, p, costs, view)
            lengths = np.asarray(lengths).reshape((6,) * 5)
            assert not looks_ahead(lengths)
            seen |= set(lengths.ravel().tolist())
    # Nothing beats the whole block by 15 % that is one draft shorter.
    assert seen == set(range(6)) - ({4} if margin > 1 else set())
    assert looks_ahead(reference["decision"])
    assert looks_ahead(reference["decision_when_skip_pays_draft"])


def test_causal_gate_by_hand():
    # Plain 1, one draft 2, two drafts 1 / 0.45; the numbers of the selection bias.
    costs = measured_costs(0.0, [2.0, 1 / 0.45], 1.0)
    p = jnp.asarray([[0.8, 0.9], [0.8, 0.0], [0.3, 0.9]], jnp.float32)

    def lengths(ahead, margin):
        config = GateConfig(margin=margin)
        return decide_causal(config, p, costs, jnp.full(3, ahead, jnp.float32)).tolist()

    # Hope for the second draft: 2.6 * 0.45 > 1; with 0.3: 1.6 * 0.45 < 1.
    assert lengths(1.0, 1.0) == [2, 1, 0]
    # 0.9 is not 1.15 times 0.81: what is behind a start does not stop it.
    assert lengths(1.0, 1.15) == [2, 2, 0]
    # No hope: 1.8 * 0.45 = 0.81 and 0.9 are both below 1.
    assert lengths(0.0, 1.0) == [0, 0, 0]
    assert decide(GateConfig(margin=1.0), p, costs).tolist() == [2, 0, 0]


def test_causal_gate_with_certain_drafts_and_floor(blocks):
    costs = linear_costs(5)
    sure = jnp.ones((1, 5), jnp.float32)
    assert decide_causal(SUNK, sure, costs, jnp.ones(1)).item() == 5
    never = jnp.zeros((1, 5), jnp.float32)
    for floor in (0, 2):
        config = GateConfig(floor=floor, margin=1.0)
        assert decide_causal(config, never, costs, jnp.zeros(1)).item() == floor
        assert decide(config, never, costs).item() == floor
    empty = jnp.zeros((3, 0), jnp.float32)
    none = gate_decide_causal(SUNK, empty, linear_costs(0), jnp.ones(3))
    assert none.tolist() == [0, 0, 0]
    p, _ = blocks
    lengths = decide_causal(GateConfig(floor=2), p, costs, jnp.zeros(len(p)))
    assert lengths.min() == 2


def test_mean_rate():
    state = gate_start(SUNK, 2)
    assert gate_mean_rate(state).tolist() == [1, 1]
    state = GateState(state.hits.at[0, 1].set(2.0), state.totals.at[0, 3].set(5.0))
    assert gate_mean_rate(state).tolist() == [0.5, 1]


def test_threshold_is_about_the_prefix():
    confidence = jnp.asarray(
        [[0.5, 0.5, 1.0], [0.9, 0.2, 1.0], [1.0, 1.0, 1.0], [np.nan, 1.0, 1.0]],
        jnp.float32,
    )
    assert threshold_lengths(confidence, 0.5).tolist() == [1, 1, 3, 0]
    assert threshold_lengths(confidence, 0.25).tolist() == [3, 1, 3, 0]
    assert threshold_lengths(confidence, 0.0).tolist() == [3, 3, 3, 3]
    # Each confidence by itself would say otherwise.
    assert (confidence[0] >= 0.5).sum() == 3


def test_nan_is_the_worst():
    costs = linear_costs(2)
    rates = rates_of(SUNK, gate_start(SUNK, 1), jnp.full((1, 2), jnp.nan))
    assert rates.tolist() == [[1, 1]]
    p = jnp.asarray([[jnp.nan, 1.0]], jnp.float32)
    assert decide(SUNK, p, costs).item() == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("edges", (1.0, 1.0)),
        ("edges", [0.0]),
        ("edges", (0.0, float("inf"))),
        ("margin", 0.99),
        ("margin", float("nan")),
        ("floor", -1),
        ("floor", True),
        ("decay", 0.0),
        ("decay", 1.01),
        ("skip_pays_draft", 1),
    ],
)
def test_config_is_checked(field, value):
    with pytest.raises(ValueError, match=f"`{field}` is"):
        GateConfig(**{field: value})


def test_arrays_and_costs_are_checked():
    p = jnp.zeros((2, 3), jnp.float32)
    with pytest.raises(ValueError, match=r"`verify_ms` is \(6,\)"):
        gate_decide(SUNK, p, linear_costs(5))
    with pytest.raises(ValueError, match="`p` is 'int32"):
        gate_decide(SUNK, jnp.zeros((2, 3), jnp.int32), linear_costs(3))
    with pytest.raises(ValueError, match="`ahead`"):
        gate_decide_causal(SUNK, p, linear_costs(3), jnp.ones(1))
    with pytest.raises(ValueError, match=r"allowed: float32\[4, n\]"):
        rates_of(SUNK, gate_start(SUNK, 4), p)
