"""Algorithm 1: reference files, the order of ties, and what it may depend on."""

import itertools
import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling.budget import choose_total, curve, ms_by_total
from dspark_jax.scheduling.early_stop import early_stop

REQUESTS, DRAFTS, TOTALS = 3, 4, 16
program = jax.jit(early_stop)
searched = jax.jit(choose_total)


def run(rows, ms_by_total, *, program=program):
    """One compiled program for all: empty slots, absent drafts, more times."""
    values = np.zeros((REQUESTS, DRAFTS), np.float32)
    for i, row in enumerate(rows):
        values[i, : len(row)] = row
    live = np.arange(REQUESTS) < len(rows)
    times = np.ones(TOTALS, np.float32)
    times[: len(ms_by_total)] = ms_by_total
    found = program(values, live, times)
    assert not found[len(rows) :].any()
    return found[: len(rows)].tolist()


def everything(rows, ms):
    """The search of all totals, with a cost for each."""
    sizes = np.array([*ms, *range(max(ms) + 1, TOTALS)])[:7]
    times = [*ms.values(), *[1e9] * TOTALS][:7]
    out = []

    def search(values, live, _):
        out.extend(searched(values, live, curve(sizes, times), 0.0, 0.0))
        return np.zeros(REQUESTS, np.int32)

    run(rows, [], program=search)
    return out


@pytest.fixture(scope="module")
def goldens(data_dir):
    return json.loads((data_dir / "scheduling" / "algorithm1.json").read_text())


def products(rows):
    return [
        np.cumprod([np.float32(Fraction(x)) for x in r], dtype=np.float32) for r in rows
    ]


def test_golden(goldens):
    """Also against the search of all totals, which has the same costs to look at."""
    cases = goldens["cases"]
    assert len(cases) == 5
    differ = []
    for case in cases:
        values = products(case["raw"])
        known = {int(t): float(1 / Fraction(x)) for t, x in case["sps"].items()}
        times = [known.get(t, 1.0) for t in range(max(known) + 1)]
        lengths = run(values, times)
        assert lengths == case["early_stop_lengths"], case["name"]
        total, score = everything(values, known)
        assert int(total) == len(values) + sum(case["global_lengths"])
        wanted = float(Fraction(case["global_throughput"]))
        assert float(score) == pytest.approx(wanted, rel=1e-6)
        if lengths != case["global_lengths"]:
            differ.append(case["name"])
    assert differ == ["appendix_case_high", "trapped_by_cliff"]


def test_equal_survivals_spread_over_requests(data_dir):
    name = "allocation_order_contrast.json"
    case = json.loads((data_dir / "scheduling" / name).read_text())
    values = [[float(Fraction(x)) for x in row] for row in case["cumulative"]]
    # Every draft is worth it up to the extra ones.
    times = [1.0] * (len(values) + case["extra"] + 1) + [99.0]
    rows = [1 + k for k in run(values, times)]
    assert rows == case["value_position_request"]
    assert rows != case["request_index_then_prefix"]
    # Drafts of value 0 are not verified, though rows cost nothing here.
    zero = case["zero_rows"]
    values = [[float(Fraction(x)) for x in row] for row in zero["cumulative"]]
    rows = [1 + k for k in run(values, [1.0] * TOTALS)]
    assert rows == zero["with_survival_floor_1e-6"]
    # Nor where the next round is the cheaper one.
    assert run([[0.0]], [9.0, 9.0, 1.0]) == [0]


def test_a_draft_that_does_not_improve_strictly_ends_it():
    # theta is 1/2, 2/4: a tie; then 3/5, which would improve.
    assert run([[1.0, 1.0]], [9, 2, 4, 5]) == [0]
    assert run([[1.0, 1.0]], [9, 2, 3.9, 5]) == [2]


def by_hand(rows, times):
    """One draft after the other, in exact fractions; None near a tie."""
    queue = sorted(
        (-Fraction(float(a)), j, i)
        for i, row in enumerate(rows)
        for j, a in enumerate(row)
        if a > 0
    )
    lengths, expected = [0] * len(rows), Fraction(len(rows))
    theta = expected / times[len(rows)]
    for k, (minus, _, i) in enumerate(queue):
        total = len(rows) + k + 1
        if total >= len(times):
            break
        expected -= minus
        following = expected / times[total]
        if abs(following - theta) < theta * Fraction(1e-5):
            return None
        if following < theta:
            break
        lengths[i], theta = lengths[i] + 1, following
    return lengths


def random_case(rng):
    rows = [
        np.cumprod(rng.random(rng.integers(0, 5)).astype(np.float32) ** 0.4)
        for _ in range(int(rng.integers(1, 4)))
    ]
    times = 5 + rng.uniform(0.2, 2.0, TOTALS).cumsum().astype(np.float32)
    return rows, times


def test_random_batches_against_the_written_steps(rng):
    lengths, checked = set(), 0
    for _ in range(200):
        rows, times = random_case(rng)
        wanted = by_hand(rows, [Fraction(float(x)) for x in times])
        if wanted is not None:
            assert run(rows, times) == wanted
            lengths.add(sum(wanted))
            checked += 1
    assert checked > 150 and len(lengths) > 5


def test_no_total_beyond_the_known_times():
    values = jnp.ones((REQUESTS, DRAFTS), jnp.float32)
    times = np.ones(TOTALS // 2, np.float32)
    # Three rows without drafts, and totals up to 7.
    assert program(values, np.ones(REQUESTS, bool), times).tolist() == [2, 1, 1]
    assert program(values, np.ones(REQUESTS, bool), times[:3]).tolist() == [0, 0, 0]


def test_admission_depends_on_admitted_prefixes_only(rng):
    """Changing what comes behind the last admitted draft changes no decision."""
    moved = 0
    for _ in range(40):
        rows, times = random_case(rng)
        lengths = run(rows, times)
        for i, k in itertools.product(range(len(rows)), range(DRAFTS)):
            # The confidence of draft k + 1 follows from draft k: what it says may not
            # take back draft k, nor bring it in.
            if k + 1 < len(rows[i]):
                other = [row.copy() for row in rows]
                other[i][k + 1 :] = 0
                shorter = run(other, times)[i]
                assert min(shorter, k + 1) == min(lengths[i], k + 1)
                moved += shorter != lengths[i]
    assert moved > 5


def test_times_of_compiled_sizes():
    found = curve([2, 5, 6], [8.0, 10.0, 22.0])
    times = ms_by_total(found, 0.5, 2.0, 8)
    assert times.tolist() == [11, 11, 11, 14.5, 14.5, 14.5, 27, np.inf]
    # An infinite time improves nothing: the largest size bounds the total.
    cheap = ms_by_total(curve([2, 5], [8.0, 8.1]), 0.0, 0.0, TOTALS)
    assert run([[0.9, 0.72, 0.36], [0.8, 0.4, 0.1]], cheap) == [2, 1]


def test_known_times_and_op_by_op_alike(rng):
    rows, times = random_case(rng)

    def known(values, live, _):
        return early_stop(values, live, times)

    def eager(values, live, times):
        return early_stop(jnp.asarray(values), live, times)

    wanted = run(rows, times)
    assert run(rows, times, program=jax.jit(known)) == wanted
    assert run(rows, times, program=eager) == wanted


def test_bad_input():
    values, live = jnp.ones((2, 3), jnp.float32), np.ones(2, bool)
    for times in (np.ones(4), np.ones((4, 1), np.float32), np.ones(0, np.float32)):
        with pytest.raises(ValueError, match=r"`ms_by_total`.*float32\[T\]"):
            early_stop(values, live, times)
    with pytest.raises(ValueError, match="`values`"):
        early_stop(values[0], live, np.ones(4, np.float32))
    with pytest.raises(ValueError, match="`live`"):
        early_stop(values, live[:1], np.ones(4, np.float32))
