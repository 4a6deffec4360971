"""The reference engine's sampler on integer weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import engine
from pallas_kernels.engine import sampling
from pallas_kernels.locate import locate

draw = jax.jit(engine.draw, static_argnames="order")
by_lane = jax.jit(engine.locate_by_lane)
by_id = jax.jit(locate)
first_point = jax.jit(engine.first_point)
stream_words = jax.jit(engine.stream_words, static_argnums=3)


def without_limit(total, seed, position, stream):
    """A point from the first word, whatever it is."""
    return np.asarray(stream_words(seed, position, stream, 1))[:, 0] % total


def repeat(weights, count):
    return np.repeat(np.asarray(weights, np.uint32)[None], count, 0)


def test_golden_rows(golden, seed_words):
    data = golden("fixed_point_sampling")
    assert sampling.UNITS == 2 ** data["scale_bits"]
    cases = data["cases"]
    width = max(len(case["weights"]) for case in cases)

    def rows(name, dtype):
        # Tokens of weight zero behind the end change no row.
        padded = [case[name] + [0] * (width - len(case[name])) for case in cases]
        return np.asarray(padded, dtype)

    probs = jnp.asarray(rows("probs_float32", np.float32))
    weights = np.asarray(engine.fixed_weights(probs))
    assert weights.dtype == np.uint32
    np.testing.assert_array_equal(weights, rows("weights", np.uint32))
    total = weights.astype(np.int64).sum(1)
    np.testing.assert_array_equal(total, [case["total"] for case in cases])
    lost = [case["lost_mass_units"] for case in cases]
    np.testing.assert_array_equal(2**31 - total, lost)
    assert total.max() > 2**31

    places = [
        (i, *x) for i, c in enumerate(cases) for x in c["integer_target_to_token"]
    ]
    case, point, token = np.asarray(places).T
    for find in (by_lane, by_id):
        found = find(jnp.asarray(weights[case]), jnp.asarray(point, jnp.uint32))
        np.testing.assert_array_equal(found, token)

    draws = [(i, d) for i, c in enumerate(cases) for d in c["seeded_draws"]]
    case, draws = np.asarray([i for i, _ in draws]), [d for _, d in draws]
    assert all(d["stream"] == "fresh" for d in draws)
    seed = seed_words(d["seed"] for d in draws)
    position = np.asarray([d["position"] for d in draws], np.int32)
    point = np.asarray([d["target"] for d in draws])
    for order in ("lanes", "ids"):
        args = (jnp.asarray(weights[case]), seed, position)
        got = draw(*args, stream=engine.FRESH, order=order)
        np.testing.assert_array_equal(got.token, [d["token"] for d in draws])
        np.testing.assert_array_equal(got.point, point)
        np.testing.assert_array_equal(got.words, [d["words_used"] for d in draws])
    # Control: without the limit every draw that took a second word goes wrong.
    size = total[case].astype(np.uint32)
    first = without_limit(size, seed, position, engine.FRESH)
    later = np.asarray([d["words_used"] > 1 for d in draws])
    np.testing.assert_array_equal(np.asarray(first) != point, later)
    assert later.any()


def test_golden_orders(golden):
    example = golden("fixed_point_sampling")["order_example"]
    assert sampling.LANES == example["lane_width"]
    row = np.zeros(example["vocab"], np.uint32)
    for token, weight in example["nonzero"]:
        row[token] = weight
    points, natural, lanes = np.asarray(example["rows"]).T
    rows, points = repeat(row, len(points)), jnp.asarray(points, jnp.uint32)
    np.testing.assert_array_equal(by_id(rows, points), natural)
    np.testing.assert_array_equal(by_lane(rows, points), lanes)
    # Control: most points have another token in the other order.
    assert (natural != lanes).mean() > 0.5


@pytest.mark.parametrize("width", [8191, 8192])
def test_order_of_lanes(width, rng):
    weights = rng.integers(0, 2**31 // width, (6, width)).astype(np.uint32)
    weights[:, rng.random(width) < 0.5] = 0
    weights[:, rng.integers(width)] = 9
    ids = np.arange(width)
    if width >= 8192:
        ids = np.lexsort((ids // 2048, ids % 2048))
    ends = np.cumsum(weights[:, ids].astype(np.int64), 1)
    point = rng.integers(0, ends[:, -1])
    point[0], point[1] = 0, ends[1, -1] - 1
    want = ids[(ends > point[:, None]).argmax(1)]
    got = by_lane(jnp.asarray(weights), jnp.asarray(point, jnp.uint32))
    np.testing.assert_array_equal(got, want)
    none = by_lane(jnp.zeros((1, width), jnp.uint32), jnp.zeros(1, jnp.uint32))
    np.testing.assert_array_equal(none, [-1])


TOTALS = (1, 3, 6, 2**16 + 1, 2**31 - 1, 2**31, 2**31 + 64, 3 << 30, 2**32 - 1)


def test_words_that_may_be_used():
    cases, rows = [], []
    for total in TOTALS:
        limit = (2**32 - 1) // total * total
        # At least half of all words, so that 128 fail with 2^-128 at most.
        assert limit >= 2**31 and limit % total == 0
        ends = [0, 1, total - 1, total, limit - 1, limit, limit + 1, 2**32 - 1]
        cases += [(w, total, w < limit) for w in ends if w < 2**32]
        rows.append((2**32 - 1, limit, 0, limit - 1))
    word, total, usable = np.asarray(cases).T
    point, count = first_point(word.astype(np.uint32)[:, None], total.astype(np.uint32))
    np.testing.assert_array_equal(count, usable)
    np.testing.assert_array_equal(point, word % total)
    # The first of several that may be used, and no other.
    point, count = first_point(np.asarray(rows, "u4"), np.asarray(TOTALS, "u4"))
    np.testing.assert_array_equal(point, np.zeros(len(TOTALS)))
    np.testing.assert_array_equal(count, np.full(len(TOTALS), 3))


def test_the_loop_is_bounded(monkeypatch):
    position = jnp.arange(4096, dtype=jnp.int32)
    seed = jnp.zeros((4096, 2), jnp.uint32)
    total = jnp.full(4096, 2**31, jnp.uint32)  # half of all words are left out
    point, words = engine.draw_point(total, seed, position, engine.FRESH)
    point, words = np.asarray(point), np.asarray(words)
    assert words.min() == 1 and 8 < words.max() <= 4 * sampling.MAX_BLOCKS
    for count in (1, 2, 4, 8):  # each word halves the rows that are left
        expected = 4096 / 2**count
        assert abs((words > count).sum() - expected) < 5 * np.sqrt(expected)
    # Behind the first block, too, the point is that of the stream's own word.
    stream = np.asarray(stream_words(seed, position, engine.FRESH, 8))
    second = np.flatnonzero((words > 4) & (words <= 8))
    taken = stream[second, words[second] - 1]
    np.testing.assert_array_equal(point[second], taken % 2**31)
    monkeypatch.setattr(sampling, "MAX_BLOCKS", 1)
    cut_point, cut = engine.draw_point(total, seed, position, engine.FRESH)
    np.testing.assert_array_equal(cut, np.where(words <= 4, words, 0))
    np.testing.assert_array_equal(cut_point[cut > 0], point[cut > 0])
    assert (np.asarray(cut_point) < 2**31).all()


def test_law_of_the_draws():
    """Chi-square with one degree of freedom per token less one, at 1e-6."""
    count, weights = 60_000, np.asarray([3, 0, 2, 1]) << 29
    total = int(weights.sum())
    seed = np.full((count, 2), 7, np.uint32)
    position = np.arange(count, dtype=np.int32)
    rows = repeat(weights, count)

    def distance(token):
        seen = np.bincount(np.asarray(token), minlength=4)
        assert seen[1] == 0
        want = count * weights[[0, 2, 3]] / total
        return float(((seen[[0, 2, 3]] - want) ** 2 / want).sum())

    for stream in (engine.FRESH, engine.REPLACEMENT):
        token = draw(rows, seed, position, stream=stream).token
        assert distance(token) < 27.63
    # Control: without the limit the first third of the points comes twice as often.
    biased = without_limit(np.uint32(total), seed, position, 0)
    assert distance(by_lane(rows, biased)) > 1000


def test_rows_do_not_depend_on_other_rows(rng, random_words):
    weights = rng.integers(0, 2**17, (13, 9000)).astype(np.uint32)
    weights[4] = 0
    seed = np.asarray(random_words(1, 13, 2))
    position = rng.integers(0, 2**31 - 1, 13).astype(np.int32)
    whole = draw(weights, seed, position, stream=0)
    assert whole.token[4] == -1 and (np.delete(whole.token, 4) >= 0).all()
    for pick in (rng.permutation(13), np.arange(5)):
        part = draw(weights[pick], seed[pick], position[pick], stream=0)
        for a, b in zip(part, whole, strict=True):
            np.testing.assert_array_equal(a, np.asarray(b)[pick])


def test_arguments_are_checked():
    weights = jnp.ones((3, 5), jnp.uint32)
    seed, position = jnp.zeros((3, 2), jnp.uint32), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match="`order` is 'rows'"):
        engine.draw(weights, seed, position, 0, order="rows")
    with pytest.raises(ValueError, match="`weights` is int32"):
        engine.draw(weights.astype(jnp.int32), seed, position, 0)
    with pytest.raises(ValueError, match="`seed` is uint32"):
        engine.draw(weights, seed[:2], position, 0)
    with pytest.raises(ValueError, match="`position` is uint32"):
        engine.draw(weights, seed, position.astype(jnp.uint32), 0)
