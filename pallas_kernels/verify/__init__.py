"""Verification: which drafted tokens stand, and what replaces the first that falls."""

from pallas_kernels.verify.api import (
    VerifiedRows,
    verify_greedy,
    verify_logits,
    verify_rows,
    verify_shared_noise,
)

__all__ = [
    "VerifiedRows",
    "verify_greedy",
    "verify_logits",
    "verify_rows",
    "verify_shared_noise",
]
