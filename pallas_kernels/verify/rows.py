"""The result of verifying rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class VerifiedRows(NamedTuple):
    """Verdict on `R` rows, each judged on its own.

    accept: bool[R]. The draft stands. True on fresh rows, where nothing is judged.
    token: int32[R]. What the row emits if it is reached: the draft where it stands,
      the replacement where it falls, the target's own token on a fresh row; -1 where
      the target row holds no usable logit.
    accept_prob: float32[R]. Chance that a draft from this row's `q` stands,
      `sum min(p, q)`, whatever the outcome was; 1 on fresh rows.
    """

    accept: jax.Array
    token: jax.Array
    accept_prob: jax.Array


def share(kept: jax.Array, is_verify: jax.Array, total: int) -> jax.Array:
    """`VerifiedRows.accept_prob`, exact where `total` is a power of two.

    Args:
      kept: int32[...]. Units that p and q share; not read on fresh rows.
      is_verify: bool[...].
      total: units of a row.
    """
    return jnp.where(is_verify, kept.astype(jnp.float32) * jnp.float32(1 / total), 1.0)
