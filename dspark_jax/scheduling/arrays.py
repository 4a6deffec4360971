"""One rule for the host and for programs: numpy arrays in, numpy arithmetic.

A host that decides about the next round while the last one computes has no core to
spare for launching a program, which costs it more than the decision. Both libraries
round every float32 operation alike, so a rule that is written for either gives the
same bits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def library(*values: Any) -> ModuleType:
    """`numpy` where no value is a JAX array or traced, else `jax.numpy`."""
    return jnp if any(isinstance(x, jax.Array) for x in values) else np
