"""Temperatures that follow a running server, from overlaps instead of outcomes.

Where drafts are drawn, verification knows more than whether a draft stood: the
overlap beta_k = sum_v min(p_v, q_v) is the chance that a draft from this row stands. It
is known for every verified position, also behind a rejected draft. As a label it
takes the noise of the last acceptance test out of the fit:

    label_k = [drafts 1..k-1 stood] * beta_k

Given the confidences c_1..c_k, its mean is that of the outcome [drafts 1..k stood],
exactly: c_1..c_k depend on the drafts before k, and given those, draft k stands with
chance beta_k. The running product of all beta is something else: it goes on through
drafts that did not stand as if they had, so where good drafts are followed by good
positions it is too low.

Greedy drafts have overlaps 0 or 1, and then both labels are the outcome.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dspark_jax.config import require
from dspark_jax.scheduling.calibration import Fit, default_grid, fit_sts, prefix_labels
from dspark_jax.scheduling.reliability import BINS
from dspark_jax.scheduling.survival import Temperatures


def overlap_labels(accepted: np.ndarray, overlap: np.ndarray) -> np.ndarray:
    """Labels for `fit_sts` that use overlaps.

    Args:
      accepted: int[S]. Length of the accepted prefix.
      overlap: float[S, N]. sum_v min(p_v, q_v) of every verified position.

    Returns:
      float64[S, N]: overlap where the drafts before stood, else 0.
    """
    overlap = np.asarray(overlap, np.float64)
    reached = np.arange(overlap.shape[1]) <= np.asarray(accepted)[:, None]
    return np.where(reached, overlap, 0.0)


@dataclasses.dataclass(frozen=True)
class OnlineSettings:
    """What an online fit remembers and when it fits again.

    Attributes:
      window: W, rounds that are kept.
      every: R, rounds between two fits.
      half_life: rounds after which a round counts half; None: all count alike.
      bins: of the calibration error.
      grid: increasing temperatures.
    """

    window: int = 2048
    every: int = 256
    half_life: float | None = None
    bins: int = BINS
    grid: tuple[float, ...] = tuple(float(t) for t in default_grid())

    def __post_init__(self) -> None:
        for name in ("window", "every", "bins"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, value, "int >= 1")
        half = self.half_life
        require(half is None or half > 0, "half_life", half, "> 0 or None")


@dataclasses.dataclass(frozen=True, eq=False)
class OnlineState:
    """The last W rounds and the temperatures in force.

    Attributes:
      settings: see there.
      temperatures: float64[N].
      logits: float32[W, N]. Round i lies at row i mod W.
      labels: float32[W, N].
      proposed: bool[W, N]. False for rows not yet filled.
      seen: rounds so far.
      fitted: rounds that had been seen at the last fit.
    """

    settings: OnlineSettings
    temperatures: np.ndarray
    logits: np.ndarray
    labels: np.ndarray
    proposed: np.ndarray
    seen: int = 0
    fitted: int = 0

    @property
    def due(self) -> bool:
        """Whether `every` rounds have come since the last fit."""
        return self.seen - self.fitted >= self.settings.every


def start_online(
    positions: int,
    settings: OnlineSettings | None = None,
    temperatures: Temperatures | None = None,
) -> OnlineState:
    """A state without a round.

    Args:
      positions: N, the draft's gamma.
      settings: default `OnlineSettings()`.
      temperatures: in force until the first fit; None: 1.
    """
    settings = settings or OnlineSettings()
    first = np.ones(positions) if temperatures is None else np.array(temperatures)
    require(first.shape == (positions,), "temperatures", temperatures, f"{positions}")
    shape = (settings.window, positions)
    return OnlineState(
        settings=settings,
        temperatures=first.astype(np.float64),
        logits=np.zeros(shape, np.float32),
        labels=np.zeros(shape, np.float32),
        proposed=np.zeros(shape, bool),
    )


def observe(
    state: OnlineState,
    logits: np.ndarray,
    accepted: np.ndarray,
    overlap: np.ndarray | None = None,
    proposed: np.ndarray | None = None,
) -> OnlineState:
    """Adds rounds, the oldest first; the state given stays as it is.

    Args:
      state: before.
      logits: float[S, N]. As the head gave them, without temperatures.
      accepted: int[S].
      overlap: float[S, N]; None: greedy rounds, whose outcome is the label.
      proposed: bool[S, N], see `fit_sts`; None: all.

    Raises:
      ValueError: arrays of other shapes.
    """
    window, positions = state.logits.shape
    logits = np.asarray(logits, np.float64)
    shape = (logits.shape[0], positions)
    labels = (
        prefix_labels(accepted, positions)
        if overlap is None
        else overlap_labels(accepted, overlap)
    )
    mask = np.ones(shape, bool) if proposed is None else np.asarray(proposed, bool)
    for name, x in (("logits", logits), ("labels", labels), ("proposed", mask)):
        require(x.shape == shape, name, x.shape, f"{shape}")
    count = shape[0]
    kept = slice(max(0, count - window), count)
    rows = (state.seen + np.arange(count)[kept]) % window
    held = {"logits": logits, "labels": labels, "proposed": mask}
    moved = {}
    for name, new in held.items():
        moved[name] = getattr(state, name).copy()
        moved[name][rows] = np.where(mask, new, 0)[kept]
    return dataclasses.replace(state, seen=state.seen + count, **moved)


def refit(state: OnlineState) -> tuple[OnlineState, Fit]:
    """Fits the rounds held; positions without a round keep their temperature."""
    settings = state.settings
    fit = fit_sts(
        state.logits,
        state.labels,
        settings.grid,
        settings.bins,
        proposed=state.proposed,
        weights=_weights(state),
    )
    found = np.isfinite(fit.ece_after)
    temperatures = np.where(found, fit.temperatures, state.temperatures)
    moved = dataclasses.replace(state, temperatures=temperatures, fitted=state.seen)
    return moved, fit


def fit_online(
    state: OnlineState,
    logits: np.ndarray,
    accepted: np.ndarray,
    overlap: np.ndarray | None = None,
    proposed: np.ndarray | None = None,
) -> OnlineState:
    """`observe`, and `refit` when it is due; what a server calls after its rounds.

    Example:
      >>> state = start_online(1, OnlineSettings(window=512, every=256))
      >>> rng = np.random.default_rng(0)
      >>> z = 3 * rng.standard_normal((512, 1))
      >>> beta = 1 / (1 + np.exp(-z / 2))
      >>> stood = (rng.random((512, 1)) < beta)[:, 0]
      >>> fit_online(state, z, stood, beta).temperatures.round(1)
      array([2.])
    """
    state = observe(state, logits, accepted, overlap, proposed)
    return refit(state)[0] if state.due else state


def _weights(state: OnlineState) -> np.ndarray | None:
    half = state.settings.half_life
    if half is None:
        return None
    window = state.logits.shape[0]
    # Age of the round in each row; rows that are not filled are masked.
    age = (state.seen - 1 - np.arange(window)) % window
    return 0.5 ** (age / half)
