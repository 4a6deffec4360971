"""Running medians of what rounds took: robust against a slow round here and there."""

from __future__ import annotations

import bisect
import collections
import math
import statistics

from dspark_jax.config import require


class ForwardSlope:
    """Milliseconds a row that rounds take on top of the curve.

    The median, over sizes with enough observations, of their medians: sizes vote
    alike, however often they run (specification of scheduling, section 5.2).
    """

    def __init__(self, window: int = 5000, min_samples: int = 10):
        """Remembers the last `window` observations of all sizes together.

        Raises:
          ValueError: not integers >= 1.
        """
        _require_counts(window=window, min_samples=min_samples)
        self._window = window
        self._min_samples = min_samples
        self._ages: collections.deque[tuple[int, float]] = collections.deque()
        # Sorted, so that a median is a look at the middle.
        self._sorted: dict[int, list[float]] = {}

    def update(self, size: int, residual: float) -> None:
        """Takes in (forward milliseconds - those of the curve) / size.

        Args:
          size: compiled rows of the round.
          residual: may be negative.

        Raises:
          ValueError: `residual` is not finite.
        """
        require(math.isfinite(residual), "residual", residual, "a finite number")
        if len(self._ages) == self._window:
            old_size, old = self._ages.popleft()
            values = self._sorted[old_size]
            del values[bisect.bisect_left(values, old)]
        self._ages.append((size, residual))
        bisect.insort(self._sorted.setdefault(size, []), residual)

    def value(self) -> float:
        """The slope, negative too; 0 while no size has enough observations."""
        medians = [
            _middle(values)
            for values in self._sorted.values()
            if len(values) >= self._min_samples
        ]
        return _middle(sorted(medians)) if medians else 0.0


class SamplerTime:
    """Milliseconds beside the forward pass, by the number of requests.

    Medians of the last observations: of rounds with as many requests, else of all
    rounds (specification of scheduling, section 5.3).
    """

    def __init__(self, window: int = 9, min_samples: int = 5):
        """Remembers the last `window` observations of each number, and of all.

        Raises:
          ValueError: not integers >= 1, or a window that never has enough.
        """
        _require_counts(window=window, min_samples=min_samples)
        require(min_samples <= window, "min_samples", min_samples, f"<= {window}")
        self._min_samples = min_samples
        self._all: collections.deque[float] = collections.deque(maxlen=window)
        self._by_requests: dict[int, collections.deque[float]] = {}

    def update(self, requests: int, ms: float) -> None:
        """Takes in one round.

        Raises:
          ValueError: `ms` is not finite.
        """
        require(math.isfinite(ms), "ms", ms, "a finite number")
        empty = collections.deque(maxlen=self._all.maxlen)
        self._by_requests.setdefault(requests, empty).append(ms)
        self._all.append(ms)

    def value(self, requests: int, *, default: float = 0.0) -> float:
        """Milliseconds for so many requests; `default` while there are too few."""
        for ring in (self._by_requests.get(requests, ()), self._all):
            if len(ring) >= self._min_samples:
                return statistics.median(ring)
        return default


def _middle(ordered: list[float]) -> float:
    """The median of sorted numbers: of an even count, the mean of the middle two."""
    high = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[high]
    return (ordered[high - 1] + ordered[high]) / 2


def _require_counts(**counts: int) -> None:
    for name, count in counts.items():
        require(isinstance(count, int) and count >= 1, name, count, "int >= 1")
