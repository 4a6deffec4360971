"""The online fit: unbiased labels, bounded memory, the offline fit's temperatures."""

import dataclasses
import itertools
from fractions import Fraction

import numpy as np
import pytest

from dspark_jax.scheduling import (
    OnlineSettings,
    calibrated,
    default_grid,
    fit_online,
    fit_sts,
    observe,
    overlap_labels,
    prefix_labels,
    refit,
    start_online,
)

TRUTH = default_grid()[[26, 16, 30]]


def rounds(rng, count):
    """Logits, overlaps (the true chances) and accepted counts."""
    logits = 2 * rng.standard_normal((count, len(TRUTH))) + 1
    overlap = calibrated(logits, TRUTH)
    accept = rng.random(overlap.shape) < overlap
    return logits, overlap, np.cumprod(accept, 1).sum(1)


def steps_off(found):
    return np.abs(np.log10(found) - np.log10(TRUTH)) * 20


def test_overlap_labels_by_hand():
    overlap = [[0.9, 0.5, 0.25]] * 4
    assert overlap_labels([0, 1, 2, 3], overlap).tolist() == [
        [0.9, 0, 0],
        [0.9, 0.5, 0],
        [0.9, 0.5, 0.25],
        [0.9, 0.5, 0.25],
    ]
    # Greedy: overlaps are 0 or 1, and the label is the outcome.
    greedy = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 1]])
    accepted = np.cumprod(greedy, 1).sum(1)
    labels = overlap_labels(accepted, greedy)
    assert np.array_equal(labels, prefix_labels(accepted, 3))


def test_labels_have_the_mean_of_survival_by_enumeration():
    """Two drafts from small laws, all outcomes with exact weights."""
    half = Fraction(1, 2)
    q1, p1 = (half, half), (Fraction(9, 10), Fraction(1, 10))
    # The second law depends on the first draft: good after token 0, bad after 1.
    q2, p2 = (half, half), {0: (half, half), 1: (Fraction(1), Fraction(0))}
    beta1 = sum(map(min, p1, q1))
    survived = ours = product = Fraction(0)
    for x1, x2 in itertools.product(range(2), repeat=2):
        drawn = q1[x1] * q2[x2]
        stands1 = min(Fraction(1), p1[x1] / q1[x1])
        stands2 = min(Fraction(1), p2[x1][x2] / q2[x2])
        beta2 = sum(map(min, p2[x1], q2))
        survived += drawn * stands1 * stands2
        for accepted, chance in ((0, 1 - stands1), (1, stands1)):
            label = overlap_labels([accepted], [[beta1, beta2]])[0, 1]
            ours += drawn * chance * Fraction(label)
        product += drawn * beta1 * beta2
    assert ours == survived
    # Control: the running product goes on through drafts that did not stand.
    assert product < survived


def test_online_and_offline_find_the_truth(rng):
    count = 60000
    logits, overlap, accepted = rounds(rng, count)
    offline = fit_sts(logits, prefix_labels(accepted, 3))
    state = start_online(3, OnlineSettings(window=count, every=count))
    for part in np.split(np.arange(count), 20):
        before = state
        state = fit_online(state, logits[part], accepted[part], overlap[part])
    assert before.temperatures.tolist() == [1, 1, 1] and not state.due
    assert steps_off(state.temperatures).max() <= 1.01
    assert steps_off(offline.temperatures).max() <= 1.01
    # Control: the temperatures are not those of raw confidences.
    assert steps_off(np.ones(3)).min() > 3


def test_overlaps_need_fewer_rounds_than_outcomes():
    off = {"overlap": [], "outcome": []}
    for seed in range(12):
        logits, overlap, accepted = rounds(np.random.default_rng(seed), 400)
        soft = fit_sts(logits, overlap_labels(accepted, overlap))
        hard = fit_sts(logits, prefix_labels(accepted, 3))
        off["overlap"].append(steps_off(soft.temperatures)[0])
        off["outcome"].append(steps_off(hard.temperatures)[0])
    assert np.mean(off["overlap"]) < 0.5 * np.mean(off["outcome"])


def test_early_stopped_rounds_are_not_rejections(rng):
    """What a server with variable lengths sees: rounds cut before doubtful drafts."""
    logits, overlap, accepted = rounds(rng, 8000)
    doubtful = calibrated(logits) < 0.4
    length = np.where(doubtful.any(1), doubtful.argmax(1), 3)
    proposed = np.arange(3) < length[:, None]
    seen = np.minimum(accepted, length)
    settings = OnlineSettings(window=8000, every=8000)
    unknown = np.where(proposed, overlap, np.nan)
    state = fit_online(start_online(3, settings), logits, seen, unknown, proposed)
    assert steps_off(state.temperatures).max() <= 2.01
    # Control: outcomes alone, where a draft that was never tried did not stand.
    censored = fit_online(start_online(3, settings), logits, seen)
    assert steps_off(censored.temperatures).max() > 5


def test_memory_is_a_ring_of_the_last_rounds(rng):
    logits, overlap, accepted = rounds(rng, 70)
    settings = OnlineSettings(window=32, every=1000)
    one_by_one = start_online(3, settings)
    for i in range(70):
        part = slice(i, i + 1)
        one_by_one = observe(one_by_one, logits[part], accepted[part], overlap[part])
    at_once = observe(start_online(3, settings), logits, accepted, overlap)
    for name in ("logits", "labels", "proposed"):
        held = getattr(at_once, name)
        assert held.shape == (32, 3)
        assert np.array_equal(held, getattr(one_by_one, name))
    state, fit = refit(at_once)
    last = slice(70 - 32, 70)
    labels = overlap_labels(accepted[last], overlap[last])
    expected = fit_sts(logits[last].astype(np.float32), labels.astype(np.float32))
    np.testing.assert_allclose(fit.ece_by_temperature, expected.ece_by_temperature)
    assert state.fitted == 70 and at_once.fitted == 0
    # Control: other rounds give another table.
    other = fit_sts(logits[:32], overlap_labels(accepted[:32], overlap[:32]))
    assert np.abs(other.ece_by_temperature - fit.ece_by_temperature).max() > 1e-3


def test_old_rounds_fade(rng):
    """The truth changes: a short half-life follows, an even window lags behind."""
    z = 2 * rng.standard_normal((2000, 1)) + 1
    truth = np.where(np.arange(2000) < 1000, 4.0, 0.5)[:, None]
    overlap = calibrated(z / truth)
    accepted = (rng.random(2000) < overlap[:, 0]).astype(int)
    found = {}
    for half_life in (None, 100.0):
        settings = OnlineSettings(window=1900, every=2000, half_life=half_life)
        state = start_online(1, settings)
        for part in np.split(np.arange(2000), 8):
            state = fit_online(state, z[part], accepted[part], overlap[part])
        found[half_life] = state.temperatures[0]
    assert abs(np.log10(found[100.0] / 0.5)) * 20 <= 2.01
    assert abs(np.log10(found[None] / 0.5)) * 20 > 4


def test_half_life_counts_rounds_from_the_newest(rng):
    logits, overlap, accepted = rounds(rng, 11)
    state = start_online(3, OnlineSettings(window=8, every=1, half_life=2.0))
    for part in (slice(0, 5), slice(5, 11)):
        state = observe(state, logits[part], accepted[part], overlap[part])
    _, fit = refit(state)
    age = np.arange(8)[::-1]
    expected = fit_sts(
        logits[3:].astype(np.float32),
        overlap_labels(accepted[3:], overlap[3:]).astype(np.float32),
        weights=0.5 ** (age / 2),
    )
    np.testing.assert_allclose(fit.ece_by_temperature, expected.ece_by_temperature)


def test_due_and_first_temperatures(rng):
    logits, overlap, accepted = rounds(rng, 6)
    settings = OnlineSettings(window=8, every=4)
    state = start_online(3, settings, [2.0, 3.0, 4.0])
    # Two drafts a round: the third position keeps what it had.
    proposed = np.broadcast_to([True, True, False], (3, 3))
    state = observe(state, logits[:3], accepted[:3], overlap[:3], proposed)
    assert not state.due and state.temperatures.tolist() == [2, 3, 4]
    state = observe(state, logits[3:4], accepted[3:4], overlap[3:4], proposed[:1])
    assert state.due
    moved, _ = refit(state)
    assert not moved.due and moved.temperatures[2] == 4
    assert moved.temperatures[:2].tolist() != [2, 3]


def test_bad_input():
    state = start_online(3)
    with pytest.raises(ValueError, match="`logits`"):
        observe(state, np.zeros((2, 4)), np.zeros(2))
    with pytest.raises(ValueError, match="`proposed`"):
        observe(state, np.zeros((2, 3)), np.zeros(2), None, np.ones((1, 3)))
    with pytest.raises(ValueError, match="`temperatures`"):
        start_online(3, temperatures=[1.0])
    for name, value in (("window", 0), ("every", 1.5), ("half_life", 0.0)):
        with pytest.raises(ValueError, match=f"`{name}`"):
            dataclasses.replace(OnlineSettings(), **{name: value})
