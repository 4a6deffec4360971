"""How long rounds take, read from when their results arrive.

With two rounds in flight the device goes from one to the next without the host:

    device   |== r ==|== r + 1 ==|== r + 2 ==|
    host             ^ r is here ^ r + 1 is here

The host waits for results anyway. Between two of them lies one round, if the host was
already waiting for both: results that were there before they were asked for tell when
the host came, and not when the device was done.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class RoundClock:
    """Times rounds that follow each other on the device, and no others.

    Nothing waits for the clock, and no program is changed for it. Left out are the
    first round after a pause, rounds that ended while the host was busy elsewhere (with
    a compilation, or in the hands of whoever reads a stream), and those behind them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        """No round in flight.

        Args:
          clock: in seconds.
        """
        self._clock = clock
        self._in_flight = 0
        # When the oldest round in flight began, where that is known.
        self._began: float | None = None

    def launched(self) -> None:
        """A round was put in flight."""
        self._in_flight += 1

    def received(self, was_there: bool) -> float | None:
        """The oldest round's results are on the host.

        Args:
          was_there: they were ready before the host asked for them.

        Returns:
          Milliseconds of the round; None where they cannot be known.

        Raises:
          RuntimeError: no round is in flight.
        """
        if not self._in_flight:
            raise RuntimeError("results of a round that was not launched")
        now, began = self._clock(), self._began
        self._in_flight -= 1
        # The next round began when this one ended, which is now if it was waited for,
        # and if the next one was in line then.
        self._began = None if was_there or not self._in_flight else now
        if was_there or began is None:
            return None
        return 1e3 * (now - began)

    def restart(self) -> None:
        """Whatever was in flight is forgotten."""
        self._in_flight, self._began = 0, None
