"""The curve's measurement, by a clock that the test turns."""

import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduling.profiling import profile_curve, trimmed_mean


def test_trimmed_mean_golden(data_dir):
    cases = json.loads((data_dir / "scheduling" / "estimators.json").read_text())
    assert len(cases["trimmed_mean"]) == 5
    for case in cases["trimmed_mean"]:
        assert trimmed_mean(case["measures"]) == Fraction(case["result"])
    # Control: neither the mean, nor that of the best four.
    assert np.mean([9, 10, 11, 12, 40]) != np.mean([9, 10, 11, 12]) != 11
    assert trimmed_mean([3, 1, 2], 0) == 2 and trimmed_mean([1, 5, 2, 9, 2], 2) == 2


class Machine:
    """A clock, and programs that move it on."""

    def __init__(self, times):
        self.now, self.calls = 0.0, []
        self._times = {size: iter(ms) for size, ms in times.items()}
        self.run = {size: lambda size=size: self._step(size) for size in times}

    def _step(self, size):
        self.calls.append(size)
        self.now += next(self._times[size]) / 1e3
        return jnp.zeros(1)

    def clock(self):
        return self.now


def test_largest_first_without_the_warm_up_and_the_ends():
    machine = Machine(
        {2: [900, 5, 6, 7, 8, 90], 8: [1, 9, 10, 11, 12, 40], 4: [50, 8, 8, 1, 8, 9]}
    )
    found = profile_curve(machine.run, clock=machine.clock)
    # In turns, so that a slow moment falls on all sizes.
    assert machine.calls == [8, 4, 2] * 6
    assert found.sizes.tolist() == [2, 4, 8] and found.sizes.dtype == np.int32
    np.testing.assert_allclose(found.ms, [7, 8, 11], rtol=1e-6)
    machine = Machine({2: [1, 2, 3, 7, 100]})
    found = profile_curve(machine.run, 2, 3, 1, clock=machine.clock)
    np.testing.assert_allclose(found.ms, [7], rtol=1e-6)


def test_waits_for_results(monkeypatch):
    """The clock stands still until the arrays are waited for."""
    now, waits = 0.0, []

    def wait(x):
        nonlocal now
        now += 0.004
        waits.append(x)
        return x

    monkeypatch.setattr(jax, "block_until_ready", wait)
    found = profile_curve({3: lambda: "arrays"}, clock=lambda: now)
    assert waits == ["arrays"] * 6
    np.testing.assert_allclose(found.ms, [4], rtol=1e-6)


def test_real_programs():
    step = jax.jit(lambda x: x @ x)
    sizes = (1, 300)
    found = profile_curve({n: lambda n=n: step(jnp.ones((n, n))) for n in sizes})
    assert found.sizes.tolist() == [1, 300] and found.ms[0] < found.ms[1]


def test_bad_input():
    with pytest.raises(ValueError, match="`run`"):
        profile_curve({})
    step = {1: lambda: 0}
    for name, value in (("warmup", -1), ("measures", 2), ("trim", 3), ("trim", -1)):
        with pytest.raises(ValueError, match="`(warmup|measures|trim)`"):
            profile_curve(step, **{name: value})
    with pytest.raises(ValueError, match="`ms`.*> 0"):
        profile_curve(step, clock=lambda: 0.0)
    with pytest.raises(ValueError, match="`trim`"):
        trimmed_mean([1, 2], 1)
