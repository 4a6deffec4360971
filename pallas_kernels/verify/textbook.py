"""The acceptance rule in floats, as the papers state it.

Leviathan et al. 2023, section 2.3, and Chen et al. 2023, algorithm 2. A draft `x`
drawn from `q` stands with probability `min(1, p(x) / q(x))`; where it falls, the
token is drawn from `max(p - q, 0)` normalised. The two add up to `p`:

    min(p, q) + (1 - sum min(p, q)) * max(p - q, 0) / sum max(p - q, 0) = p,

because `1 - sum min(p, q) = sum max(p - q, 0)`.

This is for readers, and an oracle for tests. Serving uses integer rows
(`verify/reference.py`), where the rule is exact and needs one random number.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.fixed_point import GREEDY_BELOW
from pallas_kernels.locate import locate
from pallas_kernels.verify.rows import VerifiedRows
from pallas_kernels.vocab_axis import lowest_id, row_max, row_sum, take, token_ids


def uniform(words: jax.Array) -> jax.Array:
    """Maps words to the 2^24 equally spaced points of [0, 1).

    Only the upper 24 bits are used: each point is then exact in float32 and the
    largest is 1 - 2^-24. A value of 1 would reject a draft with p >= q.

    Args:
      words: uint32[...]. Uniform random words.

    Returns:
      float32[...], `(word >> 8) * 2^-24`.
    """
    return (words >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def probabilities(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Softmax of `logits / temperature`, in float32.

    Args:
      logits: float32[R, V]. -inf excludes a token: its probability is exactly 0.
      temperature: float32[R]. Below 1e-5 the row is a one-hot at its argmax.

    Returns:
      float32[R, V]; a row that holds NaN or +inf or nothing but -inf is all zero.
    """
    top = row_max(logits)
    usable = jnp.isfinite(top)
    below = logits - jnp.where(usable, top, 0.0)[:, None]
    weights = jnp.exp(below / jnp.maximum(temperature, GREEDY_BELOW)[:, None])
    one_hot = token_ids(logits.shape[1]) == lowest_id(below == 0)[:, None]
    greedy = (temperature < GREEDY_BELOW)[:, None]
    weights = jnp.where(greedy, one_hot.astype(jnp.float32), weights)
    weights = jnp.where(usable[:, None], weights, 0.0)
    # A usable row holds a weight of exactly 1, so 1 only guards the zero rows.
    return weights / jnp.maximum(row_sum(weights), 1.0)[:, None]


def draw(probs: jax.Array, u: jax.Array) -> jax.Array:
    """Draws one token per row, ids ascending along the unit interval.

    The point is `u` times the row's total, so the row need not be normalised. A
    token of probability zero is never returned.

    Args:
      probs: float32[R, V]. Weights >= 0.
      u: float32[R]. Numbers in [0, 1).

    Returns:
      int32[R]; -1 for a row whose total is zero or NaN.
    """
    total = row_sum(probs)
    return jnp.where(total > 0, locate(probs, u * total), -1)


def verify_rows(
    p: jax.Array,
    q: jax.Array,
    draft_ids: jax.Array,
    is_verify: jax.Array,
    accept_words: jax.Array,
    token_words: jax.Array,
) -> VerifiedRows:
    """Judges drafts so that what is emitted is distributed as `p`.

    A draft stands if `u < min(1, p(x) / q(x))`; the replacement is drawn from
    `max(p - q, 0)`, from `p` where that is zero everywhere. A draft of probability
    zero under `q`, and the id -1, always fall.

    Args:
      p: float32[R, V]. Target rows, filtered as for plain sampling.
      q: float32[R, V]. The rows the drafts were really drawn from: a one-hot where
        a draft was not drawn but chosen. Ignored on fresh rows.
      draft_ids: int32[R]. Drafts, -1 for none. Ignored on fresh rows.
      is_verify: bool[R]. False marks a fresh row, which draws from `p`.
      accept_words: uint32[R]. Random words for the verdicts, used nowhere else.
      token_words: uint32[R]. Random words for the tokens, used nowhere else.

    Returns:
      VerifiedRows.
    """
    # A fresh row is a row without a proposal: its residual is p itself.
    q = jnp.where(is_verify[:, None], q, 0.0)

    p_x, q_x = take(p, draft_ids), take(q, draft_ids)
    # q(x) = 0: x was not drawn from q (or is -1), and no ratio would make it right.
    drawn = q_x > 0
    ratio = jnp.where(drawn, p_x / jnp.where(drawn, q_x, 1.0), 0.0)
    accept = uniform(accept_words) < jnp.minimum(ratio, 1.0)

    residual = jnp.maximum(p - q, 0.0)
    # No residual means p = q: a draft from q never falls, and any other id gets p.
    empty = row_max(residual) == 0
    source = jnp.where(empty[:, None], p, residual)
    replacement = draw(source, uniform(token_words))

    return VerifiedRows(
        accept=accept | ~is_verify,
        token=jnp.where(accept, draft_ids, replacement),
        accept_prob=jnp.where(is_verify, row_sum(jnp.minimum(p, q)), 1.0),
    )
