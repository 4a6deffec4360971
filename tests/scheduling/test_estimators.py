"""Running medians against reference files and the definition."""

import collections
import json
import statistics
from fractions import Fraction

import pytest

from dspark_jax.scheduling.estimators import ForwardSlope, SamplerTime


@pytest.fixture(scope="module")
def golden(data_dir):
    return json.loads((data_dir / "scheduling" / "estimators.json").read_text())


def test_slope_golden(golden):
    """Exact: the observations are fractions, and medians of fractions are too."""
    votes, small, eviction = golden["forward"]
    found = ForwardSlope(votes["window"], votes["min_samples"])
    wanted = dict(votes["estimates_at"])
    for i, (size, residual) in enumerate(votes["observations"]):
        found.update(size, residual)
        assert i not in wanted or found.value() == Fraction(wanted[i])
    found = ForwardSlope(small["window"], small["min_samples"])
    pairs = zip(small["observations"], small["estimates"], strict=True)
    for (size, residual), estimate in pairs:
        found.update(size, Fraction(residual))
        assert found.value() == Fraction(estimate)
    found, seen = ForwardSlope(), 0
    assert (eviction["window"], eviction["min_samples"]) == (5000, 10)
    wanted = dict(eviction["estimates_at"])
    for size, residual, times in eviction["observations_run_length"]:
        for _ in range(times):
            found.update(size, Fraction(residual))
            assert seen not in wanted or found.value() == Fraction(wanted[seen])
            seen += 1


def test_slope_is_the_median_of_medians(rng):
    window, least = 40, 3
    found, kept = ForwardSlope(window, least), collections.deque(maxlen=window)
    differ = 0
    for _ in range(300):
        size, residual = int(rng.choice([2, 4, 8, 64])), float(rng.normal())
        found.update(size, residual)
        kept.append((size, residual))
        groups = collections.defaultdict(list)
        for s, r in kept:
            groups[s].append(r)
        medians = [statistics.median(g) for g in groups.values() if len(g) >= least]
        assert found.value() == (statistics.median(medians) if medians else 0)
        # Control: neither means nor one vote an observation.
        differ += found.value() != statistics.median(r for _, r in kept)
    assert differ > 200


def test_sampler_golden(golden):
    assert len(golden["sampler"]) == 3
    for case in golden["sampler"]:
        found = SamplerTime()
        pairs = zip(case["observations"], case["estimates"], strict=True)
        for ms, estimate in pairs:
            found.update(3, ms)
            # By the number of requests and overall: the same observations.
            for requests in (3, 4):
                got = found.value(requests, default=-1)
                assert got == (-1 if estimate is None else Fraction(estimate))


def test_sampler_looks_at_the_same_number_then_at_all():
    found = SamplerTime()
    for _ in range(4):
        found.update(2, 1.0)
    assert found.value(2) == found.value(1) == 0.0
    found.update(1, 9.0)
    # Five in all, four with two requests and one with one.
    assert found.value(2) == 1.0 and found.value(1) == 1.0
    for _ in range(4):
        found.update(1, 9.0)
    assert found.value(1) == 9.0 and found.value(7) == 9.0
    # The last nine of all are 1 1 1 1 9 9 9 9 9; with two requests, 1 1 1 1 5.
    found.update(2, 5.0)
    assert found.value(2) == 1.0
    assert found.value(2, default=4.0) == 1.0


def test_bad_input():
    for make in (ForwardSlope, SamplerTime):
        for name, value in (("window", 0), ("min_samples", 0), ("window", 1.5)):
            with pytest.raises(ValueError, match=f"`{name}`"):
                make(**{name: value})
    with pytest.raises(ValueError, match="`min_samples`"):
        SamplerTime(window=4)
    with pytest.raises(ValueError, match="`residual`"):
        ForwardSlope().update(2, float("nan"))
    with pytest.raises(ValueError, match="`ms`"):
        SamplerTime().update(2, float("inf"))
