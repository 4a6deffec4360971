"""Accelerator building blocks: distributions, drawing, verification, publication.

This package is the bottom layer. It imports nothing from `dspark_jax`, holds no
state and reads no settings: arrays in, arrays out. A row is one next-token
distribution over the vocabulary; `R` counts rows, `V` the vocabulary. Every
function that looks along the vocabulary takes `axis_name`, the mesh axis over which
the vocabulary is split when it is called inside `jax.shard_map`; `V` then means the
shard's share, while token ids stay global.
"""

from pallas_kernels.draw import draw
from pallas_kernels.filters import (
    argmax_ids,
    filtered_probabilities,
    probabilities,
)
from pallas_kernels.publish.api import Published, publish
from pallas_kernels.verify.api import VerifiedRows, verify_greedy, verify_rows
from pallas_kernels.words import uniform

__all__ = [
    "Published",
    "VerifiedRows",
    "argmax_ids",
    "draw",
    "filtered_probabilities",
    "probabilities",
    "publish",
    "uniform",
    "verify_greedy",
    "verify_rows",
]
