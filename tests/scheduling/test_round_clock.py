"""Durations of rounds from the moments their results arrive, on a clock by hand."""

import pytest

from dspark_jax.scheduling.round_clock import RoundClock


class Device:
    """Runs rounds in line, for a host whose steps take as long as it is told."""

    def __init__(self):
        self.now, self.free = 0.0, 0.0
        self.ends = []
        self.clock = RoundClock(lambda: self.now)

    def launch(self, seconds):
        # A round begins when the device is free and the round is in line.
        self.free = max(self.free, self.now) + seconds
        self.ends.append(self.free)
        self.clock.launched()

    def work(self, seconds):
        self.now += seconds

    def receive(self):
        end = self.ends.pop(0)
        was_there = end <= self.now
        self.now = max(self.now, end)
        return self.clock.received(was_there)


@pytest.fixture
def device():
    return Device()


def run(device, rounds, ahead=2, host=0.25):
    """What the clock says of rounds that take these times."""
    found, waiting = [], list(rounds)
    for _ in rounds:
        while len(device.ends) < ahead and waiting:
            device.launch(waiting.pop(0))
        found.append(device.receive())
        device.work(host)
    return found


def test_rounds_in_line_are_timed_one_by_one(device):
    # When the first one began is not known: the device may have been idle.
    found = run(device, [1.0, 2.0, 1.5, 4.0, 1.0])
    assert found == [None, 2000.0, 1500.0, 4000.0, 1000.0]


def test_one_round_at_a_time_tells_nothing(device):
    """Between two results lies the host's time as well."""
    assert run(device, [1.0] * 4, ahead=1) == [None] * 4


def test_a_round_that_was_over_is_not_timed_nor_the_one_behind_it(device):
    """Control: the times between results would be 5.0 and 0.5 seconds."""
    device.launch(1.0)
    device.launch(1.0)
    assert device.receive() is None
    device.launch(1.5)
    device.launch(2.0)
    device.work(2.0)
    # The second ended at 2.0, and is asked for at 3.0.
    assert device.receive() is None
    # The third began at 2.0, not at 3.0.
    assert device.now == 3.0 and device.receive() is None
    assert device.receive() == 2000.0


def test_a_slow_host_is_never_taken_for_a_slow_round(device):
    assert run(device, [1.0] * 6, host=3.0) == [None] * 6


def test_a_round_launched_behind_the_last_result_has_no_known_beginning(device):
    run(device, [1.0, 1.0])
    device.work(9.0)
    # The device idled in between.
    assert run(device, [1.0, 2.0]) == [None, 2000.0]


def test_a_restart_forgets_what_was_in_flight(device):
    device.launch(1.0)
    device.launch(1.0)
    device.receive()
    device.ends.clear()
    device.clock.restart()
    with pytest.raises(RuntimeError, match="not launched"):
        device.clock.received(False)
    assert run(device, [5.0, 2.0]) == [None, 2000.0]
