"""Frozen, hashable settings of a call: sampling, policies, buckets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from dspark_jax.config import require

# Below this a temperature means greedy: argmax, lowest id on ties.
GREEDY_BELOW = 1e-5


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request samples. Defaults are greedy.

    Filters apply in one documented order to drafter, verifier and plain
    sampler alike: temperature, min-p, top-p (mass strictly before a token on
    the unfiltered row), top-k (lowest id on ties), renormalise.

    Args:
      temperature: 0 (below 1e-5) is argmax, lowest id on ties.
      top_p: in (0, 1]; 1 is off.
      top_k: None or -1 is off; otherwise >= 1.
      min_p: in [0, 1); keeps p >= min_p * max p; 0 is off.
      seed: None takes fresh entropy per call; an int makes the request
        reproducible.
      stop_ids: token ids that end the request; None takes the model's.

    Raises:
      ValueError: a value out of range, naming the field.

    Example:
      >>> SamplingParams(temperature=0.7, top_p=0.9, seed=1).greedy
      False
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None
    stop_ids: tuple[int, ...] | None = None
    repetition_penalty: None = None
    presence_penalty: None = None
    frequency_penalty: None = None

    def __post_init__(self) -> None:
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"`{name}` is not supported: it makes the target's law depend on "
                    "the drafted tokens, which the verifier does not model; leave it "
                    "out"
                )
        t = self.temperature
        require(_is_number(t) and t >= 0, "temperature", t, "a finite number >= 0")
        p = self.top_p
        require(_is_number(p) and 0 < p <= 1, "top_p", p, "(0, 1]")
        k = self.top_k
        is_int = isinstance(k, int) and not isinstance(k, bool)
        require(
            k is None or (is_int and (k == -1 or k >= 1)),
            "top_k",
            k,
            "None or -1 (off), or an int >= 1",
        )
        require(
            _is_number(self.min_p) and 0 <= self.min_p < 1,
            "min_p",
            self.min_p,
            "[0, 1)",
        )
        seed = self.seed
        require(
            seed is None
            or (
                isinstance(seed, int)
                and not isinstance(seed, bool)
                and 0 <= seed < 2**64
            ),
            "seed",
            seed,
            "None or an int in 0..2**64-1",
        )
        if self.stop_ids is not None:
            ids = tuple(self.stop_ids)
            require(
                all(isinstance(i, int) and i >= 0 for i in ids),
                "stop_ids",
                self.stop_ids,
                "ids >= 0",
            )
            object.__setattr__(self, "stop_ids", ids)

    @property
    def greedy(self) -> bool:
        """Whether the temperature means argmax."""
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether any filter beyond temperature is on."""
        top_k_on = self.top_k is not None and self.top_k != -1
        return not self.greedy and (self.top_p < 1 or top_k_on or self.min_p > 0)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Policy: every round verifies the same number of drafted tokens.

    `draft_length` None is the draft's usual number; 0 is plain decoding through the
    same code.
    """

    draft_length: int | None = None

    def __post_init__(self) -> None:
        n = self.draft_length
        ok = n is None or (isinstance(n, int) and not isinstance(n, bool) and n >= 0)
        require(ok, "draft_length", n, "None or an int >= 0")


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that programs are compiled for; anything else is padded up.

    `batch` counts requests, `prefill` prompt tokens fed at once (longer
    prompts go in chunks of the largest), `capacity` cache positions.
    """

    batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    prefill: tuple[int, ...] = (16, 64, 256)
    capacity: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

    def __post_init__(self) -> None:
        for field in ("batch", "prefill", "capacity"):
            sizes = tuple(getattr(self, field))
            ok = bool(sizes) and all(isinstance(n, int) and n > 0 for n in sizes)
            ok = ok and all(a < b for a, b in zip(sizes, sizes[1:], strict=False))
            require(ok, field, sizes, "strictly increasing ints > 0")
            object.__setattr__(self, field, sizes)

    @staticmethod
    def fit(size: int, sizes: Iterable[int]) -> int | None:
        """The smallest bucket that holds `size`, or None."""
        return next((n for n in sizes if n >= size), None)
