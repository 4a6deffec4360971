"""The budget search: reference files, an exhaustive search, rounding and its limits."""

import functools
import itertools
import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling.budget import (
    Curve,
    choose_total,
    curve,
    share,
    size_ms,
    tokens_a_ms,
)
from pallas_kernels.allocate import survival


@jax.jit
def search(values, live, newer, curve, slope, sampler_ms):
    total, score = choose_total(values, live, curve, slope, sampler_ms)
    return total, score, share(newer, live, total)


def run(older, newer, curve, slope=0.0, sampler_ms=0.0, *, requests=4, drafts=3):
    """One compiled program for all: empty slots, absent drafts, a repeated size."""

    def batch(rows):
        out = np.zeros((requests, drafts), np.float32)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return out

    live = np.arange(requests) < len(older)
    fill = (0, 5 - len(curve.sizes))
    padded = Curve(*(np.pad(x, fill, mode="edge") for x in (curve.sizes, curve.ms)))
    scalars = np.float32(slope), np.float32(sampler_ms)
    total, score, rows = search(batch(older), live, batch(newer), padded, *scalars)
    assert not rows[len(older) :].any()
    return int(total), float(score), rows[: len(older)].tolist()


def numbers(rows):
    return [[np.float32(Fraction(x)) for x in row] for row in rows]


def products(rows):
    return [np.cumprod(row, dtype=np.float32) for row in numbers(rows)]


def golden_curve(pairs):
    sizes, ms = zip(*pairs, strict=True)
    return curve(sizes, [float(Fraction(x)) for x in ms])


@pytest.fixture(scope="module")
def golden(data_dir):
    return json.loads((data_dir / "scheduling" / "budget_search.json").read_text())


@pytest.fixture(scope="module")
def stairs(data_dir):
    return json.loads((data_dir / "scheduling" / "lab18_curves.json").read_text())


def test_the_four_curves(stairs):
    older, newer = (products(stairs[f"{age}_raw"]) for age in ("older", "newer"))
    for case in stairs["curves"]:
        found = golden_curve(case["curve"])
        total, score, rows = run(older, newer, found, case["slope"], case["sampler"])
        assert total == case["chosen_total"]
        assert score == pytest.approx(float(Fraction(case["chosen_score"])), rel=1e-6)
        assert rows == case["alloc_newer"]
        *_, rows = run(older, older, found, case["slope"], case["sampler"])
        assert rows == case["alloc_older"]


def test_slope_golden(golden, stairs):
    older = products(stairs["older_raw"])
    steps = golden_curve(stairs["curves"][1]["curve"])
    for case in golden["slope_sweep_on_stairs"]:
        slope = float(Fraction(case["slope"]))
        total, score, _ = run(older, older, steps, slope, 2.0)
        assert total == case["chosen_total"]
        assert score == pytest.approx(float(Fraction(case["score"])), rel=1e-6)
        if "times" in case:
            sizes = [2, 4, 4, 6, 6, 8, 8]
            times = np.asarray(size_ms(steps, slope, 2.0))
            expected = [float(Fraction(x)) for x in case["times"]]
            got = times[np.searchsorted(steps.sizes, sizes)]
            np.testing.assert_allclose(got, expected, rtol=2e-7)


def test_special_goldens(golden):
    cases = golden["special"]
    assert len(cases) == 13
    for case in cases:
        older = numbers(case["cumulative"])
        newer = numbers(case["newer_cumulative"] or case["cumulative"])
        found = golden_curve(case["curve"])
        slope, sampler = (float(Fraction(case[k])) for k in ("slope", "sampler"))
        total, score, rows = run(older, newer, found, slope, sampler)
        if case["chosen_total"] is None:
            assert (total, score, rows) == (3, 0.0, [1, 1, 1])
            continue
        assert total == case["chosen_total"], case["name"]
        expected = float(Fraction(dict(case["scores"])[total]))
        assert score == pytest.approx(expected, rel=1e-6), case["name"]
        assert rows == case["alloc"], case["name"]


def test_random_goldens(golden):
    cases = golden["random_checked_against_exhaustive_prefix_enumeration"]
    assert len(cases) == 120
    for case in cases:
        older, newer = products(case["older_raw"]), numbers(case["newer_cumulative"])
        found = golden_curve(case["curve"])
        slope, sampler = (float(Fraction(case[k])) for k in ("slope", "sampler"))
        total, score, rows = run(older, newer, found, slope, sampler)
        assert total == case["chosen_total"]
        assert score == pytest.approx(float(Fraction(case["score"])), rel=1e-6)
        assert rows == case["alloc_newer"]
        assert run(older, older, found, slope, sampler)[2] == case["alloc_older"]


def exhaustive(rows, curve, slope, sampler_ms):
    """Best total over all prefixes of all requests, in exact fractions.

    None where two totals score alike to five digits.
    """
    best = {}
    for counts in itertools.product(*(range(len(row) + 1) for row in rows)):
        total = len(rows) + sum(counts)
        fits = [i for i, size in enumerate(curve.sizes) if size >= total]
        if not fits:
            continue
        size, ms = int(curve.sizes[fits[0]]), Fraction(float(curve.ms[fits[0]]))
        time = ms + max(Fraction(0), slope) * size + sampler_ms
        expected = len(rows) + sum(
            Fraction(float(x))
            for row, c in zip(rows, counts, strict=True)
            for x in row[:c]
        )
        best[total] = max(best.get(total, 0), expected / time)
    ranked = sorted(best, key=lambda total: -best[total])
    close = len(ranked) > 1 and best[ranked[1]] > best[ranked[0]] * (1 - Fraction(1e-5))
    return None if close else (ranked[0], float(best[ranked[0]]))


def test_no_prefixes_score_higher_on_ragged_batches(rng):
    checked, totals = 0, set()
    for _ in range(150):
        requests = int(rng.integers(1, 5))
        rows = [
            np.cumprod(rng.random(rng.integers(0, 4)).astype(np.float32) ** 0.5)
            for _ in range(requests)
        ]
        most = requests + sum(map(len, rows))
        reach = np.arange(requests, most + 2)
        count = min(len(reach), int(rng.integers(1, 6)))
        sizes = np.sort(rng.choice(reach, count, replace=False))
        found = curve(sizes, rng.uniform(4, 9) + rng.uniform(0, 2, count).cumsum())
        slope, sampler = float(rng.normal() / 2), float(rng.uniform(0, 3))
        slope, sampler = float(np.float32(slope)), float(np.float32(sampler))
        wanted = exhaustive(rows, found, Fraction(slope), Fraction(sampler))
        total, score, q = run(rows, rows, found, slope, sampler)
        assert sum(q) == total
        assert all(1 <= c <= len(row) + 1 for c, row in zip(q, rows, strict=True))
        if wanted is not None:
            assert total == wanted[0] and score == pytest.approx(wanted[1], rel=2e-6)
            checked += 1
            totals.add(total - requests)
    assert checked > 100 and len(totals) > 5


def as_written(values, live, curve, slope, sampler_ms):
    """The search one step after the other, every operation rounded to float32."""
    f = np.float32
    requests = int(live.sum())
    counted = np.where(np.nan_to_num(values) > 0, np.minimum(values, f(1)), f(0))
    queue = sorted(counted[live].ravel().tolist(), reverse=True)
    slope = max(f(slope), f(0))
    head = (slope.view(np.uint32) & np.uint32(0xFFFFF000)).view(f)
    times = [
        f(f(f(ms + f(head * f(size))) + f(f(slope - head) * f(size))) + f(sampler_ms))
        for size, ms in zip(curve.sizes, curve.ms, strict=True)
    ]
    best, best_score, expected = requests, f(0), f(requests)
    for bought in range(len(queue) + 1):
        if bought:
            if queue[bought - 1] == 0:
                break
            expected = f(expected + f(queue[bought - 1]))
        place = int(np.searchsorted(curve.sizes, requests + bought))
        if place == len(curve.sizes):
            break
        score = f(expected / times[place])
        if score > best_score:
            best, best_score = requests + bought, score
    return best, best_score


def test_every_program_rounds_like_the_written_steps(rng):
    """Alone, op by op, in a loop, with costs known to the compiler: the same bits."""
    sizes = np.arange(7, 129, 8)
    found = curve(sizes, 7 + rng.random(16).astype(np.float32).cumsum())
    slopes = rng.uniform(-0.05, 0.3, 60).astype(np.float32)
    sampler = np.float32(1.234567)
    everyone = np.ones(16, bool)
    alone = jax.jit(choose_total)

    @jax.jit
    def known(values):
        return choose_total(values, everyone, found, 0.0377, sampler)

    @jax.jit
    def in_a_loop(batches, live, found, slopes, sampler):
        def body(i, out):
            one = choose_total(batches[i], live[i], found, slopes[i], sampler)
            return tuple(o.at[i].set(x) for o, x in zip(out, one, strict=True))

        start = jnp.zeros(60, jnp.int32), jnp.zeros(60, jnp.float32)
        return jax.lax.fori_loop(0, 60, body, start)

    def same(got, wanted):
        return int(got[0]) == wanted[0] and np.asarray(got[1]) == wanted[1]

    batches = np.cumprod(rng.random((60, 16, 7)).astype(np.float32) ** 0.3, 2)
    live = rng.random((60, 16)) < 0.8
    totals, scores = in_a_loop(batches, live, found, slopes, sampler)
    for i, (values, on, slope) in enumerate(zip(batches, live, slopes, strict=True)):
        wanted = as_written(values, on, found, slope, sampler)
        assert same((totals[i], scores[i]), wanted)
        assert same(alone(values, on, found, slope, sampler), wanted)
        fixed = as_written(values, everyone, found, 0.0377, sampler)
        assert same(known(values), fixed)
        if i < 3:
            eager = choose_total(jnp.asarray(values), on, found, slope, sampler)
            assert same(eager, wanted)
    assert len(set(totals.tolist())) > 5


def test_order_of_requests_does_not_matter(rng):
    found = curve([4, 6, 9, 12], [5.0, 5.5, 6.5, 7.0])
    for _ in range(20):
        values = list(np.cumprod(rng.random((4, 3)).astype(np.float32), 1))
        order = rng.permutation(4)
        mixed = [values[i] for i in order]
        total, score, rows = run(values, values, found)
        assert run(mixed, mixed, found) == (total, score, [rows[i] for i in order])
    # Ties go by request.
    same = [[0.5, 0.5]] * 4
    *_, rows = run(same, same, curve([4, 6, 9], [5.0, 5.0, 50.0]))
    assert rows == [3, 1, 1, 1]


def test_what_is_no_survival():
    """NaN is 0, others are clamped, an empty slot's values are not read."""
    found = curve([2, 3, 4, 6], [4.0, 4.2, 4.4, 4.6])
    odd = [[np.nan, 0.9, -3.0], [1.5, 0.5, np.inf]]
    plain = [[0.0, 0.9, 0.0], [1.0, 0.5, 1.0]]
    total, score, _ = run(odd, odd, found)
    assert (total, score) == run(plain, plain, found)[:2] and total == 6
    # Without the clamp the infinite one would decide the score.
    assert score == pytest.approx((2 + 0.9 + 1 + 0.5 + 1) / 4.6)
    values = np.full((4, 3), 0.5, np.float32)
    scalars = np.float32(0), np.float32(0)
    live = np.array([False, True, False, True])
    padded = Curve(np.r_[found.sizes, 6].astype(np.int32), np.r_[found.ms, found.ms[3]])
    total, _, rows = search(values, live, values, padded, *scalars)
    assert int(total) == 6 and rows.tolist() == [0, 4, 0, 2]
    # A surplus over all positive values stays with live requests.
    assert share(0 * values, live, 7).tolist() == [0, 4, 0, 3]
    total, score, rows = search(values, live & False, values, padded, *scalars)
    assert (int(total), float(score), rows.tolist()) == (0, 0.0, [0, 0, 0, 0])


def test_a_draft_of_value_0_is_not_bought_for_a_cheaper_size():
    """A curve that falls: the larger program is faster, there is nothing to put in."""
    falls = curve([2, 4], [10.0, 5.0])
    assert run([[0.0], [0.0]], [[0.0], [0.0]], falls)[0] == 2
    # Control: the least of positive values is bought.
    tiny = [[1e-6], [0.0]]
    assert run(tiny, tiny, falls)[0] == 3


def test_size_ms_by_hand(rng):
    found = curve([2, 6, 4096], [8.0, 10.0, 20.0])
    assert size_ms(found, 0.5, 2.0).tolist() == [11, 15, 2070]
    assert size_ms(found, -3.0, 2.0).tolist() == [10, 12, 22]
    assert size_ms(found, np.nan, 0.0).tolist() == [8, 10, 20]
    slopes = rng.random(50).astype(np.float32)
    exact = found.ms + slopes.astype(np.float64)[:, None] * found.sizes
    got = [size_ms(found, slope, 0.0) for slope in slopes]
    np.testing.assert_allclose(got, exact, rtol=1.2e-7)


def test_scores_are_quotients_whatever_the_compiler_knows(rng):
    """Known times, and one time for all: a product with a reciprocal differs."""
    expected = (50 * rng.random(640)).astype(np.float32)
    place = rng.integers(0, 16, 640).astype(np.int32)
    times = (7 + rng.random(16)).astype(np.float32)
    for some, where in ((times, place), (times[:1], 0 * place)):

        def known(x, some=some, where=where):
            return tokens_a_ms(x, jnp.asarray(some), where)

        wanted = expected / some[where]
        assert np.array_equal(jax.jit(known)(expected), wanted)
        assert np.array_equal(jax.jit(tokens_a_ms)(expected, some, where), wanted)
        assert not np.array_equal(expected * (1 / some)[where], wanted)


def test_bad_input():
    refused = ([], [2, 2], [3, 2], [0, 2], [1.0, 2.0], [[1, 2]], [1, 4097])
    for sizes in refused:
        with pytest.raises(ValueError, match="`sizes`.*strictly increasing"):
            curve(sizes, np.ones(len(sizes)))
    for ms in ([1.0], [1.0, 0.0], [1.0, np.nan], [1.0, np.inf], [-1.0, 2.0]):
        with pytest.raises(ValueError, match="`ms`"):
            curve([1, 2], ms)
    found, live = curve([1, 2], [1.0, 2.0]), np.ones(2, bool)
    choose = functools.partial(choose_total, curve=found, slope=0.0, sampler_ms=0.0)
    for values in (np.ones((2, 3)), np.ones(2, np.float32)):
        with pytest.raises(ValueError, match=r"`values`.*float32\[B, n\]"):
            choose(values, live)
    values = survival(jnp.ones((2, 3), jnp.float32))
    for wrong in (np.ones(3, bool), np.ones(2)):
        with pytest.raises(ValueError, match=r"`live`.*bool\[2\]"):
            choose(values, wrong)
        with pytest.raises(ValueError, match=r"`live`"):
            share(values, wrong, 2)


def test_numpy_and_programs_agree_to_the_bit(rng):
    """The host decides in numpy, a program in JAX: totals and scores are the same."""
    steps = curve([2, 4, 8, 16, 32], [8.0, 9.0, 10.5, 12.0, 18.0])
    compiled = jax.jit(choose_total)
    for _ in range(200):
        values = np.sort(rng.random((5, 4), np.float32), axis=1)[:, ::-1].copy()
        values[rng.random((5, 4)) < 0.1] = rng.choice([0.0, 1.0, np.nan])
        live = rng.random(5) < 0.8
        slope, sampler = np.float32(rng.normal() / 4), np.float32(3 * rng.random())
        here = choose_total(values, live, steps, slope, sampler)
        assert not any(isinstance(x, jax.Array) for x in here)
        there = compiled(values, live, steps, slope, sampler)
        assert int(here[0]) == int(there[0])
        assert np.float32(here[1]).tobytes() == np.asarray(there[1]).tobytes()
