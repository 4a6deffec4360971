"""Policy and sampler enumerated together, with exact fractions."""

import itertools
import json
from fractions import Fraction as F
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling import (
    GateConfig,
    gate_decide,
    gate_decide_causal,
    measured_costs,
    threshold_lengths,
)
from dspark_jax.testing.selection import (
    SmallModel,
    emitted_law,
    foresight,
    is_lossless,
    lagged_law,
)

FILE = Path(__file__).parent.parent / "data" / "scheduling" / "selection_bias.json"
DATA = json.loads(FILE.read_text())
TARGET, DRAFT = (tuple(map(F, DATA[name])) for name in ("target", "draft"))
SPS = {int(rows): F(rate) for rows, rate in DATA["sps"].items()}
RIGHT, BIASED = [F("7/10"), F("3/10")], [F("17/20"), F("3/20")]
A, B = 0, 1

# Confidence 0.8 for the first draft; 0.9 behind A and 0 behind B.
PAIR = SmallModel(
    target=lambda prefix: TARGET,
    draft=lambda prefix: DRAFT,
    confidence=lambda prefix: (
        F(4, 5) if not prefix else F(9, 10) if prefix[0] == A else F(0)
    ),
    drafts=2,
)


def first(law):
    """Law of the first token, of a law of more."""
    size = 1 + max(tokens[0] for tokens in law)
    return [
        sum(weight for tokens, (weight, _) in law.items() if tokens[0] == x)
        for x in range(size)
    ]


def gains(confidences):
    """Expected tokens times steps per second, for 0..n drafts."""
    expected = alive = F(1)
    rates = [SPS[1]]
    for n, c in enumerate(confidences, 2):
        alive *= c
        expected += alive
        rates.append(expected * SPS[n])
    return rates


def retrospective(confidences):
    rates = gains(confidences)
    return rates.index(max(rates))


def early_stop(confidences):
    """Stops at the first length that does not gain (Algorithm 1)."""
    rates = gains(confidences)
    for n in range(1, len(rates)):
        if rates[n] <= rates[n - 1]:
            return n - 1
    return len(rates) - 1


def costs_of(drafts):
    # Plain decoding pays for its draft in neither form here: drafting is free.
    return measured_costs(
        0.0, [float(1 / SPS[n + 1]) for n in range(1, drafts + 1)], float(1 / SPS[1])
    )


run_gate = jax.jit(gate_decide, static_argnums=0)
run_causal = jax.jit(gate_decide_causal, static_argnums=0)


def row(confidences):
    return jnp.asarray([[float(c) for c in confidences]], jnp.float32)


def gate(config):
    def policy(confidences):
        costs = costs_of(len(confidences))
        return run_gate(config, row(confidences), costs).item()

    return policy


def causal_gate(config, ahead):
    def policy(confidences):
        view, costs = jnp.full(1, ahead, jnp.float32), costs_of(len(confidences))
        return run_causal(config, row(confidences), costs, view).item()

    return policy


def threshold(least):
    return lambda confidences: threshold_lengths(row(confidences), least).item()


EXACT = {
    "never": lambda confidences: 0,
    "always": lambda confidences: len(confidences),
    "early stop": early_stop,
    **{
        f"causal gate, margin {margin}, ahead {ahead}": causal_gate(
            GateConfig(margin=margin), ahead
        )
        for margin in (1.0, 1.15)
        for ahead in (0.0, 0.5, 1.0)
    },
    **{f"threshold {t}": threshold(t) for t in (0.5, 0.75, 0.9)},
}
WRONG = {
    "retrospective": retrospective,
    "gate as published": gate(GateConfig()),
    "gate as published, no margin": gate(GateConfig(margin=1.0)),
}


def test_the_reference_file():
    assert gains([F(4, 5), F(9, 10)]) == [
        F(DATA["thetas"][key]) for key in ("length0", "length1", "length2_if_A")
    ]
    assert gains([F(4, 5), F(0)])[2] == F(DATA["thetas"]["length2_if_B"])
    assert list(map(F, DATA["early_stop"])) == RIGHT
    assert list(map(F, DATA["verify_always"])) == RIGHT
    assert list(map(F, DATA["retrospective_global_search"])) == BIASED


@pytest.mark.parametrize("name", EXACT)
def test_policies_that_are_exact(name):
    law = emitted_law(PAIR, EXACT[name], 3)
    assert first(law) == RIGHT
    assert is_lossless(law)


@pytest.mark.parametrize("name", WRONG)
def test_policies_that_bias_drawn_tokens(name):
    law = emitted_law(PAIR, WRONG[name], 3)
    assert first(law) == BIASED
    assert not is_lossless(law)


def test_the_causal_gate_is_not_exact_for_doing_nothing():
    """It verifies different lengths behind A and B, and stays exact."""
    policy = causal_gate(GateConfig(margin=1.0), 1.0)
    assert policy((F(4, 5), F(9, 10))) == 2
    assert policy((F(4, 5), F(0))) == 1


def dice():
    """Three tokens, laws that depend on everything before, three drafts."""
    rng = np.random.default_rng(5)

    def table(total):
        return {
            prefix: tuple(F(int(w), total) for w in rng.multinomial(total, [1 / 3] * 3))
            for depth in range(4)
            for prefix in itertools.product(range(3), repeat=depth)
        }

    target, draft = table(7), table(6)
    chance = {
        prefix: F(int(rng.integers(0, 11)), 10)
        for depth in range(3)
        for prefix in itertools.product(range(3), repeat=depth)
    }
    return SmallModel(target.get, draft.get, chance.get, 3)


def test_random_laws_tell_causal_policies_from_others():
    model = dice()
    sps = {**SPS, 4: F(43, 100)}
    blocks = [
        model.confidences(drafted) for drafted in itertools.product(range(3), repeat=3)
    ]

    def decided(decide):
        """One call for all blocks."""
        p = jnp.asarray([[float(c) for c in b] for b in blocks], jnp.float32)
        costs = measured_costs(0.0, [float(1 / sps[n]) for n in (2, 3, 4)], 1.0)
        lengths = dict(zip(blocks, decide(p, costs).tolist(), strict=True))
        return lengths.get

    margin = GateConfig(margin=1.0)
    for ahead in (0.3, 0.6, 0.9):
        policy = decided(
            lambda p, costs, ahead=ahead: run_causal(
                margin, p, costs, jnp.full(len(p), ahead, jnp.float32)
            )
        )
        assert foresight(policy, blocks) is None
        assert is_lossless(emitted_law(model, policy, 4))
    for least in (0.1, 0.4):
        policy = decided(lambda p, costs, least=least: threshold_lengths(p, least))
        assert foresight(policy, blocks) is None
        assert is_lossless(emitted_law(model, policy, 4))
    published = decided(lambda p, costs: run_gate(margin, p, costs))
    assert foresight(published, blocks) is not None
    assert not is_lossless(emitted_law(model, published, 4))


def test_enumeration_refuses_a_policy_that_sees_its_own_token():
    """The next position's confidence decides: the smallest foresight there is."""
    model = dice()
    blocks = [
        model.confidences(drafted) for drafted in itertools.product(range(3), repeat=3)
    ]

    def peeks(confidences):
        return next((j for j in range(2) if confidences[j + 1] < F(1, 2)), 3)

    def looks_back(confidences):
        return next((j for j in range(3) if confidences[j] < F(1, 2)), 3)

    assert foresight(peeks, blocks) is not None
    assert not is_lossless(emitted_law(model, peeks, 4))
    assert foresight(looks_back, blocks) is None
    assert is_lossless(emitted_law(model, looks_back, 4))


# Three drafts, the third of which is good behind A: the old total's confidences.
TRIPLE = SmallModel(
    target=lambda prefix: TARGET,
    draft=lambda prefix: DRAFT,
    confidence=lambda prefix: (
        F(4, 5)
        if not prefix
        else F(9, 10)
        if len(prefix) == 1 or prefix[1] == A
        else F(0)
    ),
    drafts=3,
)
STEP_TIMES = [F(1), F(23, 10), F(27, 10), F(29, 10)]


def old_total(confidences):
    """The budget search for one request, on the block of the round before."""
    expected = alive = F(1)
    rates = [1 / STEP_TIMES[0]]
    for c, time in zip(confidences, STEP_TIMES[1:], strict=True):
        alive *= c
        expected += alive
        rates.append(expected / time)
    return rates.index(max(rates))


def by_position(committed, step):
    return committed + step


def by_committed_length(committed, step):
    return committed, step


def test_an_old_total_leaks_where_draws_are_used_again():
    case = DATA["two_rounds_old_total"]
    totals = [1 + old_total(TRIPLE.confidences((A, second, A))) for second in (A, B)]
    assert totals == [
        case["old_second_draft_A_total"],
        case["old_second_draft_B_total"],
    ]
    fresh = lagged_law(TRIPLE, old_total, 4, by_committed_length)
    assert is_lossless(fresh)
    wanted = case["first_token_if_draws_are_fresh_each_round"]
    assert first(fresh) == list(map(F, wanted)) == RIGHT
    reused = lagged_law(TRIPLE, old_total, 4, by_position)
    assert not is_lossless(reused)
    wanted = case["first_token_if_draw_is_keyed_by_absolute_position_only"]
    assert first(reused) == list(map(F, wanted)) == BIASED


def test_no_leak_where_the_whole_block_was_emitted():
    """Then no draw is left over, however it is named."""
    law = lagged_law(TRIPLE, old_total, 2, by_position, emitted=4)
    assert is_lossless(law)
