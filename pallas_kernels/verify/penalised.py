"""Verification with a penalised residual, an option: near-lossless by a stated bound.

The reference engine takes a fallen draft's replacement from max(P - alpha Q, 0) with
alpha = exp(-5e-5), so that the residual is never empty. What is emitted, A, then
deviates from P:

    P - eps / (1 + eps)  <=  A  <=  (1 + eps) P,    eps = 1 - alpha = 5.0e-5

On integer rows alpha Q is rounded up; rounded down, the upper bound would not hold.
Residual and fallen points are not equally many, so that a replacement needs random
words of its own.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.fixed_point import high_word
from pallas_kernels.integer_rows import TOTAL
from pallas_kernels.locate import locate
from pallas_kernels.verify import reference
from pallas_kernels.verify.rows import VerifiedRows, share
from pallas_kernels.vocab_axis import row_sum, take

PENALTY = 5e-5


def verify_rows(
    p: jax.Array,
    q: jax.Array,
    draft_ids: jax.Array,
    offsets: jax.Array,
    is_verify: jax.Array,
    points: jax.Array,
    words: jax.Array,
    *,
    alpha: float = math.exp(-PENALTY),
    total: int = TOTAL,
    axis_name: str | None = None,
) -> VerifiedRows:
    """`verify_rows` with mode "penalised".

    Args:
      p: as for `pallas_kernels.verify_rows`.
      q: likewise.
      draft_ids: likewise.
      offsets: likewise.
      is_verify: likewise.
      points: likewise.
      words: uint32[R, 2]. Random words of the replacements.
      alpha: static, in (0, 1], taken to the nearest multiple of 2^-32. 1 is the
        plain residual.
      total: as for `pallas_kernels.verify_rows`.
      axis_name: likewise.

    Returns:
      VerifiedRows; `accept_prob` is the engine's proxy, 1 less the weight of the
      penalised residual, which is at most 1 - alpha below the chance of acceptance.
    """
    exact = reference.verify_rows(
        p, q, draft_ids, offsets, is_verify, points, total=total, axis_name=axis_name
    )
    # q - floor((1 - alpha) q) is alpha q rounded up.
    spared = high_word(q.astype(jnp.uint32), jnp.uint32(round((1 - alpha) * 2**32)))
    residual = jnp.maximum(p - (q - spared.astype(jnp.int32)), 0)
    weight = row_sum(residual, axis_name)
    token = locate(residual, scaled(words, weight), axis_name)
    q_x = take(q, draft_ids, axis_name)
    drawn = (offsets >= 0) & (offsets < q_x)
    # A draft that was not drawn from q is replaced by its own point, as always.
    fell = is_verify & ~exact.accept & drawn & (exact.token >= 0)
    proxy = share(jnp.maximum(total - weight, 0), is_verify, total)
    return VerifiedRows(exact.accept, jnp.where(fell, token, exact.token), proxy)


def scaled(words: jax.Array, limit: jax.Array) -> jax.Array:
    """A uniform integer below a limit, from 64 bits.

    Args:
      words: uint32[R, 2], high word first.
      limit: int32[R], at least 0.

    Returns:
      int32[R], floor(word * limit / 2^64): no value is off by more than 2^-34 of
      itself.
    """
    count = limit.astype(jnp.uint32)
    carried = words[:, 0] * count + high_word(words[:, 1], count)
    over = (carried < words[:, 0] * count).astype(jnp.uint32)
    return (high_word(words[:, 0], count) + over).astype(jnp.int32)
