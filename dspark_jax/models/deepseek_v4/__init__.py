"""DeepSeek-V4: a target family, see `models.family`."""

from dspark_jax.models.deepseek_v4.model import (
    abstract_params,
    declaration,
    evaluate,
    head_table,
    unit_counts,
)
from dspark_jax.models.deepseek_v4.placing import (
    check_mesh,
    chunk_fits,
    cut,
    for_cpu,
    grown,
    put,
    state_axes,
)
from dspark_jax.models.deepseek_v4.state import commit, empty_state, state_bytes

__all__ = [
    "abstract_params",
    "check_mesh",
    "chunk_fits",
    "commit",
    "cut",
    "declaration",
    "empty_state",
    "evaluate",
    "for_cpu",
    "grown",
    "head_table",
    "put",
    "state_axes",
    "state_bytes",
    "unit_counts",
]
