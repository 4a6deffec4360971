"""The result of verifying rows."""

from typing import NamedTuple

import jax


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
