"""Matrices as 8-bit integers with one scale a row, to store small drafts in half.

    w[r, c] ~ q[r, c] * scale[r],   q in -127..127,   scale = max |w[r]| / 127

The largest weight of a row is kept to float32 rounding; the others move by at most half
a scale.
"""

from __future__ import annotations

import numpy as np

LARGEST = 127


def quantise(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int8[..., R, C], scale float32[..., R]) of finite weights [..., R, C]."""
    x = np.asarray(weights, np.float32)
    scale = np.abs(x).max(axis=-1) / np.float32(LARGEST)
    # A row of zeros has no scale of its own.
    safe = np.where(scale > 0, scale, np.float32(1))
    q = np.rint(x / safe[..., None]).astype(np.int8)
    return q, scale.astype(np.float32)


def dequantise(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float32[..., R, C]."""
    return q.astype(np.float32) * scale[..., None]
