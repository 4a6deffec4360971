"""The reference engine's rule, all draws counted: reference values, law, bound."""

import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import engine

acceptance = jax.jit(engine.acceptance)
residual = jax.jit(engine.penalised_residual, static_argnums=2)
weights_of = jax.jit(engine.fixed_weights)

SIXTHS = np.asarray([s for s in itertools.product(range(7), repeat=3) if sum(s) == 6])
PAIRS = np.asarray(list(itertools.product(SIXTHS, SIXTHS))) / 6
EPS = -math.expm1(-engine.PENALTY)
# float32 `exp` and products, and weights cut to 2^-31.
SLACK = 1e-6


def log(probs):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, np.float64)).astype(np.float32)


def fractions(values):
    return np.asarray([float(Fraction(v)) for v in values])


def law(p, q, penalty):
    """Law of the emitted token, all draws counted, and what it is made of.

    Acceptance and weights come from the code; the draft's law, the uniform and the
    point are summed over, not sampled.

    Returns:
      float64[N, V] law, float64[N, V] acceptance of each draft, float64[N, V]
      replacement weights as a share of 2^31.
    """
    count, width = p.shape
    ids = np.tile(np.arange(width, dtype=np.int32), count)
    rows = [np.repeat(log(x), width, 0) for x in (p, q)]
    stands = np.asarray(acceptance(*rows, ids), np.float64).reshape(count, width)
    cut = weights_of(residual(log(p), log(q), penalty))
    weights = np.asarray(cut, np.float64) / 2**31
    mass = weights.sum(1, keepdims=True)
    falls = (q * (1 - stands)).sum(1, keepdims=True)
    share = weights / np.where(mass > 0, mass, 1)
    return q * stands + falls * share, stands, weights


def outside_the_bound(p, q, penalty, eps, slack):
    """Pairs whose law leaves P - eps / (1 + eps) .. (1 + eps) P."""
    emitted = law(p, q, penalty)[0]
    low = emitted < p - eps / (1 + eps) - slack
    high = emitted > (1 + eps) * p + slack
    return int((low | high).any(1).sum())


def test_residual_golden(golden):
    cases = golden("residual_metric")["cases"]
    p, q = (log([case[name] for case in cases]) for name in ("target", "draft"))
    ids = jnp.asarray([case["draft_token"] for case in cases], jnp.int32)
    (tolerance,) = {case["tolerance"] for case in cases}

    def close(got, name, unit=1.0):
        want = np.asarray([case[name] for case in cases])
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * unit)

    close(acceptance(p, q, ids), "accept_probability")
    close(residual(p, q, engine.PENALTY), "penalised_residual")
    close(residual(p, q, 0.0), "standard_residual")
    weights = weights_of(residual(p, q, engine.PENALTY))
    close(weights, "penalised_weights", 2.0**31)
    close(engine.acceptance_proxy(weights), "metric_accept_prob")
    # The proxy is the mean acceptance to within eps and what the cut of weights adds.
    mean = np.asarray([case["mean_acceptance_standard"] for case in cases])
    gap = mean - np.asarray(engine.acceptance_proxy(weights))
    assert (gap > -tolerance).all() and (gap < EPS + tolerance).all()
    # Control: without the penalty the residual of equal rows is empty.
    with pytest.raises(AssertionError):
        close(residual(p, q, 0.0), "penalised_residual")
    with pytest.raises(AssertionError):
        close(acceptance(q, p, ids), "accept_probability")


def test_the_proxy_of_weights_above_one_is_zero():
    weights = jnp.asarray([[2**31, 512]], jnp.uint32)
    np.testing.assert_array_equal(engine.acceptance_proxy(weights), 0)


def test_configured_penalty(golden):
    data = golden("one_position_exact")["configured_penalty"]
    assert data["penalty"] == engine.PENALTY
    one_hot = log([[1, 0]])
    left = 1 - np.asarray(residual(one_hot, one_hot, engine.PENALTY))[0, 0]
    assert f"{np.float32(left).view(np.uint32):08x}" == data["alpha_float32_hex"]
    np.testing.assert_allclose(EPS, data["epsilon_float64"], rtol=1e-12)


@pytest.mark.parametrize("alpha", ["1", "9/10", "99/100", "999/1000"])
def test_one_position_exact(alpha, golden):
    data = golden("one_position_exact")
    table = data["tables"][alpha]
    p, q = fractions(data["target"])[None], fractions(data["draft"])[None]
    emitted, stands, weights = law(p, q, -math.log(Fraction(alpha)))
    for got, name in (
        (emitted, "output"),
        (q * stands, "accepted_mass"),
        (stands, "draft_token_accept_prob"),
        (weights, "replacement_weight"),
        (weights / weights.sum(), "replacement_prob"),
    ):
        want = fractions(table[name])
        np.testing.assert_allclose(got[0], want, atol=SLACK, err_msg=name)
    proxy = engine.acceptance_proxy(jnp.asarray(weights * 2**31, jnp.uint32))
    want = fractions([table["metric_one_minus_replacement_mass"]])
    np.testing.assert_allclose(proxy, want, atol=SLACK)


@pytest.mark.parametrize("alpha, column", [("9/10", 3), ("99/100", 5)])
def test_one_position_grid(alpha, column, golden):
    rows = golden("one_position_grid")["rows"]
    p, q = (np.asarray([row[i] for row in rows]) / 6 for i in (0, 1))
    assert len(rows) == len(PAIRS) == 784
    emitted, stands, weights = law(p, q, -math.log(Fraction(alpha)))
    want = [fractions(row[column]) for row in rows]
    np.testing.assert_allclose(emitted, want, atol=SLACK)
    mass = fractions([row[column + 1] for row in rows])
    np.testing.assert_allclose(weights.sum(1), mass, atol=SLACK)
    mean = fractions([row[2] for row in rows])
    np.testing.assert_allclose((q * stands).sum(1), mean, atol=SLACK)
    # Control: the lossless rule, and the neighbouring alpha.
    for wrong in (0.0, -2 * math.log(Fraction(alpha))):
        assert np.abs(law(p, q, wrong)[0] - want).max() > 5e-3


def test_grid_summary(golden):
    summary = golden("one_position_exact")["grid_summary"]
    p, q = PAIRS[:, 0], PAIRS[:, 1]
    for entry in summary["alphas"]:
        alpha, eps = (float(Fraction(entry[name])) for name in ("alpha", "epsilon"))
        penalty = -math.log(alpha)
        violations = outside_the_bound(p, q, penalty, eps, SLACK)
        assert violations == entry["bound_violations"] == 0
        change = law(p, q, penalty)[0] - p
        changed = int((np.abs(change).max(1) > SLACK).sum())
        assert changed == entry["pairs_with_changed_output"]
        extremes = [change.max(), change.min(), np.abs(change).sum(1).max() / 2]
        names = ("largest_increase", "largest_decrease", "max_total_variation")
        want = fractions([entry[name] for name in names])
        np.testing.assert_allclose(extremes, want, atol=SLACK)


def test_bound_and_what_leaves_it(rng):
    p, q = PAIRS[:, 0], PAIRS[:, 1]
    assert outside_the_bound(p, q, engine.PENALTY, EPS, SLACK) == 0
    # Control: other alphas leave it, one of them by no more than another 5e-5.
    assert outside_the_bound(p, q, 2 * engine.PENALTY, EPS, SLACK) > 0
    assert outside_the_bound(p, q, 1e-3, EPS, SLACK) > 100
    random = rng.dirichlet(np.full(7, 0.3), size=(2, 2000))
    assert outside_the_bound(*random, engine.PENALTY, EPS, SLACK) == 0
    assert outside_the_bound(*random, 2 * engine.PENALTY, EPS, SLACK) > 0
