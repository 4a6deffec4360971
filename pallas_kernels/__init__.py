"""Accelerator building blocks: integer rows, drawing, verification, publication.

This package is the bottom layer. It imports nothing from `dspark_jax`, holds no
state and reads no settings: arrays in, arrays out. A row is one next-token
distribution over the vocabulary; `R` counts rows, `V` the vocabulary. Every
function that looks along the vocabulary takes `axis_name`, the mesh axis over which
the vocabulary is split when it is called inside `jax.shard_map`; `V` then means the
shard's share, while token ids stay global.
"""

from pallas_kernels.allocate import allocate, carried, survival
from pallas_kernels.draw import draw
from pallas_kernels.filters import filtered_logits, filtered_rows
from pallas_kernels.fixed_point import scale_of
from pallas_kernels.implementation import (
    Implementation,
    implementation_here,
    require_implementation,
)
from pallas_kernels.integer_rows import TOTAL, integer_rows, points
from pallas_kernels.noise import noisy_argmax
from pallas_kernels.publish import Published, confidence_error, override, publish
from pallas_kernels.sample.api import Sampled, argmax_ids, sample_logits
from pallas_kernels.verify.api import (
    VerifiedRows,
    verify_greedy,
    verify_logits,
    verify_rows,
    verify_shared_noise,
)

__all__ = [
    "TOTAL",
    "Implementation",
    "Published",
    "Sampled",
    "VerifiedRows",
    "allocate",
    "argmax_ids",
    "carried",
    "confidence_error",
    "draw",
    "filtered_logits",
    "filtered_rows",
    "implementation_here",
    "integer_rows",
    "noisy_argmax",
    "override",
    "points",
    "publish",
    "require_implementation",
    "sample_logits",
    "scale_of",
    "survival",
    "verify_greedy",
    "verify_logits",
    "verify_rows",
    "verify_shared_noise",
]
