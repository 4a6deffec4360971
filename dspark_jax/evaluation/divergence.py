"""Where two decodings of one prompt part, and whether that is a fault.

Greedy decoding picks the larger of two logits. Programs that differ in shape may
differ in the last bits of a logit, so a near tie can fall either way; what
follows such a position differs with good reason. A difference where the margin
was clear is a fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.models import family
from dspark_jax.models.params import Tree, is_stacked
from dspark_jax.models.rows import dense_rows
from dspark_jax.spec import Spec

# Largest logit minus the second largest, below which a difference is a tie.
NEAR_TIE = 1e-3

Verdict = Literal["same", "near_tie", "mismatch"]


@dataclasses.dataclass(frozen=True)
class Divergence:
    """How two token sequences compare.

    Attributes:
      verdict: "same", "near_tie" or "mismatch".
      position: index of the first difference; None when they are the same.
      tokens: what each of them has there; None behind the end of a shorter one.
      margin: the target's margin there.
    """

    verdict: Verdict
    position: int | None = None
    tokens: tuple[int | None, int | None] | None = None
    margin: float | None = None


def judge(
    plain: Sequence[int],
    other: Sequence[int],
    margins: Sequence[float] | np.ndarray,
    near_tie: float = NEAR_TIE,
) -> Divergence:
    """Judges the first difference between two decodings of one prompt.

    Later differences follow from the first and are not judged.

    Args:
      plain: tokens of plain decoding.
      other: tokens to compare, of the same request and limit.
      margins: of the target before each token of `plain`, see `top2_margins`.
      near_tie: a margin below this is a tie.

    Raises:
      ValueError: fewer margins than tokens of `plain`.

    Example:
      >>> judge([5, 6, 7], [5, 9, 7], [1.0, 0.5, 2.0]).verdict
      'mismatch'
      >>> judge([5, 6, 7], [5, 9, 7], [1.0, 1e-5, 2.0]).verdict
      'near_tie'
    """
    if len(margins) < len(plain):
        raise ValueError(
            f"`margins` has {len(margins)} entries for {len(plain)} tokens; give one "
            "for every token of `plain`"
        )
    for position in range(max(len(plain), len(other))):
        pair = (_at(plain, position), _at(other, position))
        if pair[0] == pair[1]:
            continue
        if None in pair:
            # The same tokens, but one goes on: no tie explains that.
            return Divergence("mismatch", position, pair)
        margin = float(margins[position])
        verdict: Verdict = "near_tie" if margin < near_tie else "mismatch"
        return Divergence(verdict, position, pair, margin)
    return Divergence("same")


def top2_margins(
    spec: Spec, params: Tree, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    """The target's margin after every token, with one pass over the sequences.

    Jittable with `spec` static.

    Args:
      spec: the model.
      params: `{"target": ..., ...}`.
      tokens: int32[B, P]. Prompt and generated ids, right-padded.
      lengths: int32[B]. Real tokens.

    Returns:
      float32[B, P]. Largest logit minus the second largest of the row after each
      token: entry t belongs to token t + 1. Infinity behind a sequence's end.
    """
    batch, width = tokens.shape
    stacked = is_stacked(params["target"])
    dtype = jnp.dtype(spec.cache_dtype)
    # Everything is in the block. The state stays empty; a cache has to hold the tiles
    # that the block touches.
    target = family.target_of(spec.target)
    state = target.empty_state(spec.target, batch, width, dtype, stacked)
    rows = dense_rows(tokens, lengths, jnp.zeros((batch,), jnp.int32))
    logits, _, _ = target.evaluate(
        spec.target, params["target"], state, width, rows, mesh=spec.mesh
    )
    top, _ = jax.lax.top_k(logits, 2)
    margins = (top[:, 0] - top[:, 1]).reshape(batch, width)
    real = jnp.arange(width, dtype=jnp.int32)[None] < lengths[:, None]
    return jnp.where(real, margins, jnp.inf)


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None
