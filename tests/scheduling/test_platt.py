"""Shifts beside temperatures: found where they are needed, and not from noise."""

import itertools
from functools import partial

import numpy as np
import pytest

from dspark_jax.scheduling import (
    KnownRounds,
    calibrated,
    default_grid,
    default_shifts,
    expected_calibration_error,
    fit_platt,
    fit_sts,
    metrics,
    survival,
)
from dspark_jax.scheduling.choice import KINDS, choose, fit_kind
from dspark_jax.scheduling.platt import settings_in_order
from dspark_jax.scheduling.survival import sigmoid

close = partial(np.testing.assert_allclose, rtol=0, atol=1e-12)
SHIFTS = np.array([-0.8, -0.6])
HEAT = default_grid()[[25, 16]]
# Both of them, 1, and a larger one.
FEW = default_grid()[[16, 20, 25, 30]]


def made_up(rng, rounds, shifts=SHIFTS, heat=HEAT):
    """Rounds whose head is right once it is shifted and scaled; chances near 1/2."""
    logits = 1.2 * rng.standard_normal((rounds, 2))
    stood = rng.random(logits.shape) < sigmoid((logits + shifts) / heat)
    accepted = np.cumprod(stood, 1).sum(1)
    return KnownRounds(logits, accepted, None, np.ones(logits.shape, bool))


def errors(rounds, chances):
    return metrics(chances, rounds.outcomes).ece


def test_the_shift_comes_before_the_division(rng):
    logits = rng.standard_normal((5, 2))
    found = calibrated(logits, HEAT, SHIFTS)
    close(found, 1 / (1 + np.exp(-(logits + SHIFTS) / HEAT)))
    close(calibrated(logits, None, SHIFTS), 1 / (1 + np.exp(-logits - SHIFTS)))
    close(survival(logits, HEAT, SHIFTS), np.cumprod(found, 1))
    assert np.array_equal(calibrated(logits, HEAT, [0, 0]), calibrated(logits, HEAT))
    # Controls: after the division, and the other way.
    assert np.abs(found - sigmoid(logits / HEAT + SHIFTS)).max() > 0.05
    assert np.abs(found - calibrated(logits, HEAT, -SHIFTS)).max() > 0.1


def test_a_known_shift_is_found_and_temperatures_cannot(rng):
    fitted, others = made_up(rng, 20000), made_up(rng, 100000)
    heat = fit_sts(fitted.logits, fitted.labels)
    assert (errors(others, survival(others.logits, heat.temperatures)) > 0.05).all()
    fit = fit_platt(fitted.logits, fitted.labels, FEW)
    assert fit.shifts is not None
    right = errors(others, survival(others.logits, fit.temperatures, fit.shifts))
    assert (right < 0.01).all()
    assert (fit.ece_after < fit.ece_before / 5).all()
    np.testing.assert_allclose(fit.ece_by_temperature.min(1), fit.ece_after)
    # Controls: what was found, used with the other sign and behind the division.
    wrong = survival(others.logits, fit.temperatures, -fit.shifts)
    assert errors(others, wrong).max() > 0.1
    late = np.cumprod(sigmoid(others.logits / fit.temperatures + fit.shifts), axis=1)
    assert errors(others, late).max() > 0.03


def test_no_other_pair_is_better(rng):
    """A search of its own, over a small grid, in the order that is stated."""
    rounds, grid, shifts = made_up(rng, 300), [0.5, 1.0, 2.0], [-1.0, 0.0, 0.5, 1.0]
    pairs = [
        *itertools.product([0.0, 0.5], [1.0, 0.5, 2.0]),
        *itertools.product([-1.0, 1.0], [1.0]),
        *itertools.product([-1.0, 1.0], [0.5, 2.0]),
    ]
    assert settings_in_order(shifts, grid) == pairs
    reached, best = np.ones(300), []
    for k in range(2):
        tries = [
            expected_calibration_error(
                reached * sigmoid((rounds.logits[:, k] + b) / t), rounds.labels[:, k]
            )
            for b, t in pairs
        ]
        best.append(pairs[int(np.argmin(tries))])
        b, t = best[-1]
        reached = reached * sigmoid((rounds.logits[:, k] + b) / t)
    fit = fit_platt(rounds.logits, rounds.labels, grid, shifts)
    assert fit.shifts is not None
    pairs_found = zip(fit.shifts.tolist(), fit.temperatures.tolist(), strict=True)
    assert list(pairs_found) == best


def test_what_changes_nothing_wins_ties():
    assert default_shifts().tolist()[::15] == [-1.5, 0.0, 1.5]
    assert len(default_shifts()) == 31
    order = settings_in_order(default_shifts(), default_grid())
    assert len(order) == 31 * 41 and order[0] == (0.0, 1.0)
    assert order[1] == (0.0, default_grid()[19])
    assert [b for b, t in order if t == 1.0][:3] == [0.0, -0.1, 0.1]
    # Sure and right whatever is done to them; fit_sts takes the least temperature.
    logits = 900.0 * np.array([[1, 1], [1, -1]])
    labels = np.array([[1.0, 1.0], [1.0, 0.0]])
    fit = fit_platt(logits, labels)
    assert fit.shifts is not None
    assert fit.shifts.tolist() == [0, 0] and fit.temperatures.tolist() == [1, 1]
    assert fit_sts(logits, labels).temperatures.tolist() == [0.1, 0.1]


@pytest.mark.parametrize("name", ["sts", "sts_fit"])
def test_with_no_shift_it_is_the_fit_of_the_reference(data_dir, name):
    data = dict(np.load(data_dir / "scheduling" / f"{name}.npz"))
    known = {"sts": ("temperatures_15", "ece_after_15")}
    heat, after = known.get(name, ("temperatures", "ece_after"))
    grid = data["temperature_grid" if name == "sts" else "grid"]
    fit = fit_platt(data["logits"], data["prefix_mask"], grid, [0.0])
    assert fit.temperatures.tolist() == data[heat].tolist()
    close(fit.ece_after, data[after])
    assert fit.shifts is not None and not fit.shifts.any()
    assert fit_sts(data["logits"], data["prefix_mask"], grid).shifts is None


def test_ragged_rounds_and_weights(rng):
    rounds = made_up(rng, 400)
    short = rounds.proposed & [True, False]
    grid, shifts = [0.5, 1.0, 2.0], [-0.8, 0.0]
    fit = fit_platt(rounds.logits, rounds.labels, grid, shifts, proposed=short)
    assert fit.shifts is not None
    assert (fit.shifts[1], fit.temperatures[1]) == (0, 1)
    assert np.isnan(fit.ece_after[1]) and np.isnan(fit.ece_by_temperature[1]).all()
    times = rng.integers(0, 4, 400)
    weighted = fit_platt(rounds.logits, rounds.labels, grid, shifts, weights=times)
    z, labels = (np.repeat(x, times, 0) for x in (rounds.logits, rounds.labels))
    close(
        weighted.ece_by_temperature,
        fit_platt(z, labels, grid, shifts).ece_by_temperature,
    )


def test_other_rounds_choose(rng):
    plain, zero = np.ones(2), np.zeros(2)
    worlds = {
        "identity": (zero, plain),
        "temperatures": (zero, default_grid()[[30, 30]]),
        "shifts": (SHIFTS, HEAT),
    }
    for kind, (shifts, heat) in worlds.items():
        rounds = [made_up(rng, n, shifts, heat) for n in (6000, 6000, 60000)]
        choice = choose(rounds[0], rounds[1], FEW)
        assert tuple(choice.errors) == KINDS
        assert choice.errors[choice.kind] == min(choice.errors.values())
        # Shifts contain temperatures: either may win by chance.
        allowed = KINDS[1:] if kind == "temperatures" else (kind,)
        assert choice.kind in allowed
        fit = fit_kind(choice.kind, rounds[0], FEW)
        chances = survival(rounds[2].logits, fit.temperatures, fit.shifts)
        assert errors(rounds[2], chances).max() < 0.02
    fit = fit_kind("identity", rounds[0])
    assert fit.temperatures.tolist() == [1, 1] and fit.shifts is None
    close(fit.ece_after, fit.ece_before)


def test_the_choice_keeps_noise_out(rng):
    """A right head and few rounds: fits are worse than none, choosing helps."""
    others = made_up(rng, 20000, np.zeros(2), np.ones(2))
    found = {"shifts": [], "chosen": []}
    for _ in range(8):
        halves = [made_up(rng, 100, np.zeros(2), np.ones(2)) for _ in range(2)]
        both = KnownRounds(
            *(
                np.concatenate([getattr(half, name) for half in halves])
                for name in ("logits", "accepted")
            ),
            None,
            np.ones((200, 2), bool),
        )
        kinds = {"shifts": "shifts", "chosen": choose(*halves, FEW).kind}
        for name, kind in kinds.items():
            fit = fit_kind(kind, both, FEW)
            chances = survival(others.logits, fit.temperatures, fit.shifts)
            found[name].append(errors(others, chances).mean())
    right = errors(others, survival(others.logits)).mean()
    assert np.mean(found["shifts"]) > right + 0.015
    assert np.mean(found["chosen"]) < np.mean(found["shifts"]) - 0.01


def test_bad_input():
    ones = np.ones((2, 3))
    with pytest.raises(ValueError, match=r"`shifts`.*3 numbers"):
        survival(ones, None, [1.0])
    with pytest.raises(ValueError, match="`shifts`.*finite"):
        calibrated(ones, None, [1.0, 2.0, np.nan])
    for shifts in ([], [1.0, 0.0], [0.0, np.inf]):
        with pytest.raises(ValueError, match="`shifts`"):
            fit_platt(ones, ones, shifts=shifts)
    with pytest.raises(ValueError, match="`grid`.*> 0"):
        fit_platt(ones, ones, [0.0, 1.0])
    nothing = KnownRounds(ones, np.zeros(2, int), None, np.zeros((2, 3), bool))
    with pytest.raises(ValueError, match="`others`"):
        choose(nothing, nothing)
