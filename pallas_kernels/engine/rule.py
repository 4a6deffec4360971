"""The engine's acceptance rule, in float32, with a penalised residual.

With alpha = exp(-penalty) and eps = 1 - alpha, a draft x from Q stands with probability
min(1, P(x) / Q(x)); where it falls, the token is drawn from max(P - alpha Q, 0). As
alpha < 1, that is never zero everywhere, even if P = Q, so that what a rounding error
or a uniform of exactly 1 rejects has a replacement. The price: the rule is only
near-lossless. In exact arithmetic the law A of the emitted token satisfies, for every
token,

    P(x) - eps / (1 + eps) <= A(x) <= (1 + eps) P(x).

For the configured penalty of 5e-5, eps is 4.99988e-5; with alpha rounded to float32, as
it is here, 5.00083e-5. The bound is the ideal rule's: cutting weights to 2^-31, the
fallback of `verify_rows` and float32 add errors of the same order to rows of 130
thousand tokens, and for all of them together no bound is claimed. The law of
`pallas_kernels.verify_rows` is P exactly.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.engine.sampling import UNITS, Order, draw, fixed_weights
from pallas_kernels.engine.streams import (
    ACCEPT,
    FRESH,
    REPLACEMENT,
    stream_words,
    uniform,
)
from pallas_kernels.verify.rows import VerifiedRows
from pallas_kernels.vocab_axis import lowest_id, row_max, row_sum

PENALTY = 5e-5


def acceptance(log_p: jax.Array, log_q: jax.Array, draft_ids: jax.Array) -> jax.Array:
    """Chance that each draft stands, exp(min(log P(x) - log Q(x), 0)).

    Args:
      log_p: float32[R, V]. Target log-probabilities; -inf where a filter excludes.
      log_q: float32[R, V]. Log-probabilities the drafts were drawn from.
      draft_ids: int32[R]. -1 for none.

    Returns:
      float32[R] in [0, 1]; 0 for the id -1 and for a token that the target excludes.
      A token that only the draft excludes, which cannot have been drawn, has 1.
    """
    index = jnp.maximum(draft_ids, 0)[:, None]
    p = jnp.take_along_axis(log_p, index, axis=1)[:, 0]
    q = jnp.take_along_axis(log_q, index, axis=1)[:, 0]
    possible = (draft_ids >= 0) & (p > -jnp.inf)
    # The engine's exp(-inf - -inf) would stand; no token outside P may.
    return jnp.where(possible, jnp.exp(jnp.minimum(p - q, 0.0)), 0.0)


def penalised_residual(
    log_p: jax.Array, log_q: jax.Array, penalty: float = PENALTY
) -> jax.Array:
    """max(P - alpha Q, 0) with alpha = exp(-penalty) rounded to float32.

    Args:
      log_p: float32[R, V].
      log_q: float32[R, V].
      penalty: static, at least 0; 0 gives the residual of the lossless rule.

    Returns:
      float32[R, V], not normalised.
    """
    alpha = jnp.float32(math.exp(-penalty))
    return jnp.maximum(jnp.exp(log_p) - alpha * jnp.exp(log_q), 0.0)


def acceptance_proxy(weights: jax.Array) -> jax.Array:
    """What the engine reports as a row's chance to accept.

    In exact arithmetic that is sum min(P, Q) - D, where 0 <= D <= eps is what the
    penalty adds to the residual; cutting the weights adds up to V * 2^-31.

    Args:
      weights: uint32[R, V]. Weights of the penalised residual.

    Returns:
      float32[R], max(1 - sum / 2^31, 0), whatever became of the draft.
    """
    mass = row_sum(weights).astype(jnp.float32) * jnp.float32(1 / UNITS)
    return jnp.maximum(1.0 - mass, 0.0)


def verify_rows(
    log_p: jax.Array,
    log_q: jax.Array,
    logits: jax.Array,
    draft_ids: jax.Array,
    is_verify: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    *,
    penalty: float = PENALTY,
    order: Order = "lanes",
) -> VerifiedRows:
    """Judges drafts as the reference engine does: near-lossless, see the module.

    A row whose weights are all zero emits the lowest id among the maxima of its
    unfiltered logits. That happens where P is close to Q and spread so thinly that
    every token's eps Q(x) is below 2^-31.

    Args:
      log_p: float32[R, V]. Target log-probabilities, filtered: -inf is excluded.
      log_q: float32[R, V]. The rows the drafts were drawn from. Ignored on fresh rows.
      logits: float32[R, V]. The target's, before temperature and filters.
      draft_ids: int32[R]. -1, for none, falls. Ignored on fresh rows.
      is_verify: bool[R]. False marks a fresh row, which draws from P.
      seed: uint32[R, 2], low word first. The request's seed, not the draft's.
      position: int32[R]. See `decode_position`.
      penalty: static, at least 0. The engine's is 5e-5.
      order: static. See `draw`.

    Returns:
      VerifiedRows, with `acceptance_proxy` as accept_prob; 1 on fresh rows.

    Raises:
      ValueError: `penalty` out of range, or as for `draw`.
    """
    if not 0 <= penalty < math.inf:
        raise ValueError(f"`penalty` is {penalty}; it must be finite and at least 0")
    verify = is_verify[:, None]
    word = stream_words(seed, position, ACCEPT, 1)[:, 0]
    stands = uniform(word) < acceptance(log_p, log_q, draft_ids)
    accept = stands & is_verify

    # A fresh row is a row without a proposal: its residual is P itself.
    log_q = jnp.where(verify, log_q, -jnp.inf)
    weights = fixed_weights(penalised_residual(log_p, log_q, penalty))
    stream = jnp.where(is_verify, REPLACEMENT, FRESH)
    drawn = draw(weights, seed, position, stream, order=order).token
    first = lowest_id(logits == row_max(logits)[:, None])
    drawn = jnp.where(drawn < 0, first, drawn)

    return VerifiedRows(
        accept=accept | ~is_verify,
        token=jnp.where(accept, draft_ids, drawn),
        accept_prob=jnp.where(is_verify, acceptance_proxy(weights), 1.0),
    )
