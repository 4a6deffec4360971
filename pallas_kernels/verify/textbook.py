"""The acceptance rule in floats, as the papers state it.

Leviathan et al. 2023, section 2.3, and Chen et al. 2023, algorithm 2. A draft `x`
drawn from `q` stands with probability `min(1, p(x) / q(x))`; where it falls, the
token is drawn from `max(p - q, 0)` normalised. The two add up to `p`:

    min(p, q) + (1 - sum min(p, q)) * max(p - q, 0) / sum max(p - q, 0) = p,

because `1 - sum min(p, q) = sum max(p - q, 0)`.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.draw import draw
from pallas_kernels.filters import argmax_ids
from pallas_kernels.verify.rows import VerifiedRows
from pallas_kernels.vocab_axis import row_max, row_sum, take
from pallas_kernels.words import uniform


def verify_rows(
    p: jax.Array,
    q: jax.Array,
    draft_ids: jax.Array,
    is_verify: jax.Array,
    accept_words: jax.Array,
    token_words: jax.Array,
    axis_name: str | None = None,
) -> VerifiedRows:
    """See `pallas_kernels.verify_rows`."""
    # A fresh row is a row without a proposal: its residual is p itself.
    q = jnp.where(is_verify[:, None], q, 0.0)

    p_x = take(p, draft_ids, axis_name)
    q_x = take(q, draft_ids, axis_name)
    # q(x) = 0: x was not drawn from q (or is -1), and no ratio would make it right.
    drawn = q_x > 0
    ratio = jnp.where(drawn, p_x / jnp.where(drawn, q_x, 1.0), 0.0)
    accept = uniform(accept_words) < jnp.minimum(ratio, 1.0)

    residual = jnp.maximum(p - q, 0.0)
    # No residual means p = q: a draft from q never falls, and any other id gets p.
    empty = row_max(residual, axis_name) == 0
    source = jnp.where(empty[:, None], p, residual)
    replacement = draw(source, uniform(token_words), axis_name=axis_name)

    return VerifiedRows(
        accept=accept | ~is_verify,
        token=jnp.where(accept, draft_ids, replacement),
        accept_prob=jnp.where(is_verify, row_sum(jnp.minimum(p, q), axis_name), 1.0),
    )


def verify_greedy(
    logits: jax.Array,
    draft_ids: jax.Array,
    is_verify: jax.Array,
    axis_name: str | None = None,
) -> VerifiedRows:
    """See `pallas_kernels.verify_greedy`."""
    best = argmax_ids(logits, axis_name)
    accept = ((draft_ids == best) & (best >= 0)) | ~is_verify
    return VerifiedRows(accept, best, accept.astype(jnp.float32))
