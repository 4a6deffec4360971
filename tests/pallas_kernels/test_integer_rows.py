"""Rows of integers: exact sums, closeness to softmax, independence of the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fixed_point import scale_of
from pallas_kernels.integer_rows import TOTAL, integer_rows, points

rows_of = jax.jit(integer_rows, static_argnames=("total",))


def weights(logits, temperature=1.0, total=TOTAL) -> np.ndarray:
    logits = jnp.asarray(logits, jnp.float32)
    scale = scale_of(np.broadcast_to(temperature, logits.shape[:1]))
    return np.asarray(rows_of(logits, jnp.asarray(scale), total=total))


def softmax(logits, temperature) -> np.ndarray:
    wide = np.asarray(logits, np.float32).astype(np.float64)
    parts = np.exp((wide - wide.max(1, keepdims=True)) / temperature)
    return parts / parts.sum(1, keepdims=True)


def hard_rows(rng, width: int) -> dict[str, tuple[np.ndarray, float]]:
    """Rows by name, with a temperature."""
    normal = rng.normal(size=(2, width)) * 3
    masked, lonely = normal.copy(), np.full((2, width), -np.inf)
    masked[:, rng.permutation(width)[: width // 2]] = -np.inf
    lonely[:, width // 2] = 7.0
    return {
        "usual": (normal, 1.0),
        "flat": (np.zeros((2, width)), 1.0),
        "nearly flat": (normal / 300, 1.0),
        "cold": (normal, 0.01),
        "hot": (normal, 50.0),
        "huge": (normal * 1e4, 1.0),
        "masked": (masked, 0.7),
        "one token": (lonely, 1.0),
        "ties": (np.round(normal), 1.0),
        "bfloat16": (np.asarray(jnp.asarray(normal, jnp.bfloat16), np.float32), 1.0),
    }


@pytest.mark.parametrize(
    "width",
    [1, 2, 100, 5000, 49152, pytest.param(151_936, marks=pytest.mark.slow)],
)
def test_rows_sum_to_the_total_and_are_close_to_softmax(rng, width):
    for name, (logits, temperature) in hard_rows(rng, width).items():
        found = weights(logits, temperature)
        assert (found >= 0).all(), name
        np.testing.assert_array_equal(found.sum(1, dtype=np.int64), TOTAL, name)
        distance = np.abs(found / TOTAL - softmax(logits, temperature)).sum(1) / 2
        assert distance.max() <= width * 2.0**-31 + 2e-6, (name, distance)
        assert (found[np.isneginf(logits)] == 0).all(), name


def test_a_usual_row_of_a_large_vocabulary_is_closer(rng):
    logits = rng.normal(size=(2, 151_936)) * 3
    distance = np.abs(weights(logits) / TOTAL - softmax(logits, 1.0)).sum(1) / 2
    assert distance.max() < 2.5e-5


@pytest.mark.parametrize("total", [6, 12])
def test_small_totals_give_whole_shares(total):
    shares = np.asarray([[3, 2, 1], [1, 1, 4], [2, 2, 2]]) * (total // 6)
    np.testing.assert_array_equal(weights(np.log(shares), total=total), shares)


def test_the_rest_goes_to_the_lowest_of_the_top_tokens():
    found = weights([[0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert found[0, 1] - found[0, 2] in (0, 1) and found[0, 2] > found[0, 0]
    # 2^30 is one more than three times its third.
    assert found[1, 0] == found[1, 1] + 1 == found[1, 2] + 1


def test_a_larger_logit_never_weighs_less(rng):
    logits = np.sort(rng.normal(size=(1, 40_000)) * 4)
    assert (np.diff(weights(logits)[0]) >= 0).all()


def test_cold_rows_are_one_hot_at_the_lowest_maximum():
    logits = [[1.0, 3.0, 3.0], [-np.inf, -5.0, -7.0]]
    for temperature in (0.0, 9e-6):
        expected = [[0, TOTAL, 0], [0, TOTAL, 0]]
        np.testing.assert_array_equal(weights(logits, temperature), expected)


def test_rows_without_a_law_are_zero():
    logits = [[1.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf], [0.0, 0.0]]
    found = weights(logits)
    assert (found[:3] == 0).all() and found[3].sum() == TOTAL


def test_a_row_does_not_depend_on_the_others(rng):
    logits = rng.normal(size=(7, 3000)) * 3
    temperature = rng.uniform(0.2, 2, 7)
    together = weights(logits, temperature)
    order = rng.permutation(7)
    shuffled = weights(logits[order], temperature[order])
    np.testing.assert_array_equal(shuffled, together[order])
    for row in range(7):
        alone = weights(logits[row : row + 1], temperature[row])
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("width", [64, 1204, 5000])
def test_a_split_vocabulary_gives_the_same_bits(rng, vocab_mesh, width):
    split = jax.jit(
        jax.shard_map(
            lambda x, scale: integer_rows(x, scale, axis_name="vocab"),
            mesh=vocab_mesh,
            in_specs=(jax.P(None, "vocab"), jax.P()),
            out_specs=jax.P(None, "vocab"),
        )
    )
    for logits, temperature in hard_rows(rng, width).values():
        scale = jnp.asarray(scale_of(np.full(2, temperature)))
        found = split(jnp.asarray(logits, jnp.float32), scale)
        np.testing.assert_array_equal(found, weights(logits, temperature))


def test_controls_rounding_alone_breaks_the_sum_and_the_sign(rng):
    # Rounded shares do not add up by themselves.
    p = softmax(rng.normal(size=(1, 5000)), 1.0)
    assert np.rint(p * TOTAL).sum() != TOTAL
    # Rounding to nearest where every share is 0.6 of a unit: the top would owe.
    flat = np.full(10, 0.6)
    assert 6 - np.rint(flat)[1:].sum() < 0
    assert (weights(np.zeros((1, 10)), total=6) >= 0).all()


def test_points_are_spread_evenly():
    every = np.arange(0, 2**32, 2**20, dtype=np.uint64).astype(np.uint32)
    np.testing.assert_array_equal(points(jnp.asarray(every)), every >> 2)
    counts = np.bincount(points(jnp.asarray(every), 6), minlength=6)
    assert counts.sum() == 4096 and counts.min() >= 682 and counts.max() <= 683
    last = jnp.asarray([2**32 - 1], jnp.uint32)
    assert points(last)[0] == TOTAL - 1 and points(last, 6)[0] == 5


@pytest.mark.parametrize("total", [0, TOTAL + 1])
def test_totals_out_of_range(total):
    with pytest.raises(ValueError, match="total"):
        integer_rows(jnp.zeros((1, 3)), jnp.ones(1), total=total)


def test_vocabularies_out_of_range():
    with pytest.raises(ValueError, match="1048576 tokens"):
        jax.eval_shape(
            integer_rows,
            jax.ShapeDtypeStruct((1, 2**20), jnp.float32),
            jax.ShapeDtypeStruct((1,), jnp.float32),
        )


def test_engine_greedy_still_draws_between_close_logits():
    logits = jnp.asarray([[2.0, 2.0 - 2e-5, 1.0]])
    cold = np.zeros(1)
    ours = integer_rows(logits, jnp.asarray(scale_of(cold)))
    np.testing.assert_array_equal(ours, [[TOTAL, 0, 0]])
    theirs = integer_rows(logits, jnp.asarray(scale_of(cold, engine_greedy=True)))
    gap = float(logits[0, 0] - logits[0, 1])
    odds = np.exp(-gap / 1e-5)
    share = np.asarray(theirs[0]) / TOTAL
    np.testing.assert_allclose(share, [1 / (1 + odds), odds / (1 + odds), 0], atol=1e-5)
