"""Calibration against reference values, and against wrong versions of itself."""

import json
from functools import partial

import numpy as np
import pytest

from dspark_jax.scheduling import (
    auroc,
    brier,
    calibrated,
    calibration_noise,
    default_grid,
    expected_calibration_error,
    fit_sts,
    metrics,
    prefix_labels,
    reliability,
    summary,
    survival,
)

close = partial(np.testing.assert_allclose, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def sts(data_dir):
    return dict(np.load(data_dir / "scheduling" / "sts.npz"))


@pytest.fixture(scope="module")
def engine(data_dir):
    return dict(np.load(data_dir / "scheduling" / "sts_fit.npz"))


def wrong_ece(pred, label, bins, *, right_closed=False, clamp=True):
    """The calibration error with one rule changed."""
    if clamp:
        pred = np.clip(pred, 1e-8, 1 - 1e-8)
    index = np.ceil(pred * bins) - 1 if right_closed else np.floor(pred * bins)
    index = np.clip(index, 0, bins - 1)
    gaps = [
        np.sum(index == b) * abs(pred[index == b].mean() - label[index == b].mean())
        for b in range(bins)
        if (index == b).any()
    ]
    return sum(gaps) / len(pred)


def test_survival_is_the_product_of_confidences(sts):
    raw = survival(sts["logits"])
    assert raw.dtype == np.float64
    close(raw, sts["raw_survival"])
    for bins in (15, 20):
        found = survival(sts["logits"], sts[f"temperatures_{bins}"])
        close(found, sts[f"calibrated_survival_{bins}"])
    # Control: the chances of single drafts are other numbers.
    assert np.abs(calibrated(sts["logits"]) - sts["raw_survival"]).max() > 0.5
    # A reciprocal temperature would be noticed.
    wrong = survival(sts["logits"], 1 / sts["temperatures_15"])
    assert np.abs(wrong - sts["calibrated_survival_15"]).max() > 0.1
    assert survival(np.array([-800.0, 800.0])).tolist() == [0, 0]


def test_metrics_of_raw_confidences(sts):
    found = metrics(survival(sts["logits"]), sts["prefix_mask"], 20)
    assert found.count.tolist() == [600] * 7
    close(found.ece, sts["ece_raw_20"])
    close(found.auc, sts["auc_raw"])
    close(found.brier, sts["brier_raw"])
    close(found.prediction, sts["pred_mean_raw"])
    close(found.label, sts["target_mean"])
    names = ("ece", "auc", "brier", "prediction", "label")
    close([summary(found)[name] for name in names], sts["summary_raw"])
    # Control: 15 bins are not 20.
    other = metrics(survival(sts["logits"]), sts["prefix_mask"], 15)
    assert np.abs(other.ece - sts["ece_raw_20"]).max() > 1e-3


def test_metrics_of_confidences_in_float32(sts):
    confidence = calibrated(sts["logits"]).astype(np.float32).astype(np.float64)
    found = metrics(np.cumprod(confidence, 1), sts["prefix_mask"], 20)
    np.testing.assert_allclose(found.ece, sts["ece_raw_20_f32sigmoid"], atol=1e-7)


def test_metrics_after_calibration(sts):
    fitted = survival(sts["logits"], sts["temperatures_20"])
    found = metrics(fitted, sts["prefix_mask"], 20)
    for name in ("ece", "auc", "brier"):
        close(getattr(found, name), sts[f"{name}_cal{'_20' * (name == 'ece')}"])


@pytest.mark.parametrize("bins", [15, 20])
def test_fit(sts, bins):
    fit = fit_sts(sts["logits"], sts["prefix_mask"], sts["temperature_grid"], bins)
    assert fit.temperatures.tolist() == sts[f"temperatures_{bins}"].tolist()
    close(fit.ece_before, sts[f"ece_before_{bins}"])
    close(fit.ece_after, sts[f"ece_after_{bins}"])
    # Control: the chance of the single draft as the label gives another fit.
    passed = sts["prefix_mask"]
    before = np.concatenate([np.ones((600, 1)), passed[:, :-1]], 1)
    conditional = np.where(before > 0, passed, 1.0)
    other = fit_sts(sts["logits"], conditional, sts["temperature_grid"], bins)
    assert other.temperatures.tolist() != fit.temperatures.tolist()


def test_fit_by_temperature(engine):
    fit = fit_sts(engine["logits"], engine["prefix_mask"], engine["grid"])
    assert fit.temperatures.tolist() == engine["temperatures"].tolist()
    close(fit.ece_before, engine["ece_before"])
    close(fit.ece_after, engine["ece_after"])
    close(fit.ece_by_temperature, engine["ece_by_temperature"])
    # Control: position by position, without the product, is another table.
    alone = [
        fit_sts(engine["logits"][:, k : k + 1], engine["prefix_mask"][:, k : k + 1])
        for k in range(3)
    ]
    table = np.concatenate([one.ece_by_temperature for one in alone])
    assert np.abs(table[0] - engine["ece_by_temperature"][0]).max() < 1e-6
    assert np.abs(table - engine["ece_by_temperature"]).max() > 0.01


def test_default_grid_is_the_reference_grid(sts, engine):
    assert np.array_equal(default_grid().astype(np.float32), sts["temperature_grid"])
    close(default_grid(), engine["grid"])


def test_bins_are_closed_on_the_left():
    # Every prediction lies on an edge of the four bins.
    pred = np.array([0.0, 0.25, 0.25, 0.5, 0.75, 1.0])
    label = np.array([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    found = reliability(pred, label, 4)
    assert found.count.tolist() == [1, 2, 1, 2]
    close(found.prediction, [1e-8, 0.25, 0.5, (0.75 + 1 - 1e-8) / 2])
    close(found.label, [0, 0.5, 0, 0.5])
    ours = expected_calibration_error(pred, label, 4)
    close(ours, wrong_ece(pred, label, 4))
    assert abs(ours - wrong_ece(pred, label, 4, right_closed=True)) > 0.05
    # The clamp shows in the size of the gap, and it is what keeps 1 in the last bin.
    sure = np.array([1.0, 1.0])
    assert expected_calibration_error(sure, sure, 4) == pytest.approx(1e-8, rel=1e-6)
    assert wrong_ece(sure, sure, 4, clamp=False) == 0


def test_the_first_of_equal_errors_wins():
    # A logit of 0 has confidence one half at every temperature.
    fit = fit_sts(np.zeros((4, 2)), np.array([[1, 0], [1, 1], [0, 0], [0, 0]]))
    assert np.ptp(fit.ece_by_temperature, axis=1).tolist() == [0, 0]
    assert fit.temperatures.tolist() == [default_grid()[0]] * 2
    last = default_grid()[::-1][np.argmin(fit.ece_by_temperature[0][::-1])]
    assert last != fit.temperatures[0]


def test_auroc_counts_ties_within_a_bin_as_half():
    assert auroc([0.2, 0.8], [0, 1]) == 1
    assert auroc([0.8, 0.2], [0, 1]) == 0
    # 1e-4 apart: one bin of 1000, though the exact area would be 1.
    assert auroc([0.50010, 0.50020], [0, 1]) == 0.5
    assert np.isnan(auroc([0.1, 0.9], [1, 1])) and np.isnan(auroc([], []))
    assert auroc([1.0, 0.999], [1, 0]) == 0.5
    # A label of 0.5 is half of either class: against itself it is a tie.
    assert auroc([0.3], [0.5]) == 0.5


def test_brier_and_empty_input():
    assert brier([0.5, 1.0], [1, 0]) == 0.625
    assert np.isnan(brier([], [])) and np.isnan(expected_calibration_error([], []))


def test_noise_is_the_error_of_right_predictions(rng):
    pred = rng.random(500)
    errors = [
        expected_calibration_error(pred, rng.random(500) < pred) for _ in range(400)
    ]
    assert calibration_noise(pred) == pytest.approx(np.mean(errors), rel=0.05)
    # Control: predictions that are wrong have an error above it.
    wrong = expected_calibration_error(pred, rng.random(500) < pred**2)
    assert wrong > 3 * calibration_noise(pred)


def test_summary_weighs_positions_and_skips_nan():
    predicted = np.array([[0.9, 0.5], [0.1, 0.4], [0.8, 0.9]])
    labels = np.array([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    proposed = np.array([[True, True], [True, False], [True, False]])
    found = metrics(predicted, labels, 10, proposed=proposed)
    assert found.count.tolist() == [3, 1]
    assert found.auc[0] == 1 and np.isnan(found.auc[1])
    over_all = summary(found)
    # The second position's area is NaN: its count is not in the sum either.
    assert over_all["auc"] == 1
    assert over_all["label"] == pytest.approx((2 + 1) / 4)
    assert over_all["ece"] == pytest.approx((3 * found.ece[0] + found.ece[1]) / 4)
    shown = json.loads(json.dumps(found.to_json()))
    assert shown["auc"] == [1, None] and shown["overall"]["auc"] == 1


def synthetic(rng, rounds, truth, spread=2.0):
    """Logits whose calibrated confidences are the truth, and accepted counts."""
    logits = spread * rng.standard_normal((rounds, len(truth))) + 1
    accept = rng.random(logits.shape) < calibrated(logits, truth)
    return logits, np.cumprod(accept, 1).sum(1)


def steps_off(found, truth):
    """Distance in steps of the default grid."""
    return np.abs(np.log10(found) - np.log10(truth)) * 20


TRUTH = default_grid()[[26, 16, 30]]


def test_ragged_proposals(rng):
    logits, accepted = synthetic(rng, 30000, TRUTH)
    # Lengths that do not depend on outcomes: the causal rule "stop before a draft
    # whose confidence is below one half".
    doubtful = calibrated(logits) < 0.5
    length = np.where(doubtful.any(1), doubtful.argmax(1), 3)
    proposed = np.arange(3) < length[:, None]
    seen = np.minimum(accepted, length)
    labels = prefix_labels(seen, 3)
    junk = np.where(proposed, logits, np.nan)
    fit = fit_sts(junk, np.where(proposed, labels, np.nan), proposed=proposed)
    assert steps_off(fit.temperatures, TRUTH).max() <= 1.01
    # Control: what was not proposed taken for rejected.
    wrong = fit_sts(logits, labels)
    assert steps_off(wrong.temperatures, TRUTH).max() > 5


def test_a_position_without_a_proposal_keeps_temperature_1(rng):
    logits, accepted = synthetic(rng, 500, TRUTH)
    proposed = np.broadcast_to([True, True, False], logits.shape)
    fit = fit_sts(logits, prefix_labels(accepted, 3), proposed=proposed)
    whole = fit_sts(logits[:, :2], prefix_labels(accepted, 3)[:, :2])
    assert fit.temperatures.tolist() == [*whole.temperatures, 1.0]
    assert np.isnan(fit.ece_after[2]) and np.isnan(fit.ece_by_temperature[2]).all()


def test_weights_count_rounds(rng):
    logits, accepted = synthetic(rng, 300, TRUTH)
    labels = prefix_labels(accepted, 3)
    times = rng.integers(0, 4, 300)
    weighted = fit_sts(logits, labels, weights=times)
    repeated = fit_sts(np.repeat(logits, times, 0), np.repeat(labels, times, 0))
    close(weighted.ece_by_temperature, repeated.ece_by_temperature)
    unweighted = fit_sts(logits, labels)
    gap = weighted.ece_by_temperature - unweighted.ece_by_temperature
    assert np.abs(gap).max() > 1e-3


def test_bad_input():
    ones = np.ones((2, 3))
    with pytest.raises(ValueError, match="`temperatures`.*3 numbers"):
        survival(ones, [1.0, 2.0])
    with pytest.raises(ValueError, match="`temperatures`.*> 0"):
        calibrated(ones, [1.0, 2.0, 0.0])
    for grid in ([], [2.0, 1.0], [0.0, 1.0], [1.0, np.nan]):
        with pytest.raises(ValueError, match="`grid`"):
            fit_sts(ones, ones, grid)
    with pytest.raises(ValueError, match="`prefix_mask`"):
        fit_sts(ones, ones[:1])
    with pytest.raises(ValueError, match="`prefix_mask`.*0, 1"):
        fit_sts(ones, 2 * ones)
    with pytest.raises(ValueError, match="`logits`"):
        fit_sts(np.nan * ones, ones)
    with pytest.raises(ValueError, match="prefixes"):
        fit_sts(ones, ones, proposed=[[True, False, True]] * 2)
    with pytest.raises(ValueError, match="`weights`"):
        fit_sts(ones, ones, weights=[1.0])
    with pytest.raises(ValueError, match="`bins`"):
        reliability([0.5], [1], 0)
    with pytest.raises(ValueError, match="`pred`"):
        expected_calibration_error([1.5], [1])
    with pytest.raises(ValueError, match="`label`"):
        brier([0.5], [0.5, 0.5])
