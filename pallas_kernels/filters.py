"""From logits to the row that is sampled: temperature, min-p, top-p, top-k.

There is one order of the filters and one implementation of it. The plain sampler,
the drafter and the verifier call the same function, so that a draft is always judged
under the very rule it was drawn by.

All filters keep a prefix of one order: logit descending, equal logits by lower id.

* min-p keeps tokens with `p >= min_p * max(p)`.
* top-p drops a token when the mass strictly before it exceeds `top_p`, measured on
  the row after temperature and before any filter. The first token always survives.
* top-k keeps the first `top_k` tokens.

So the filters intersect to the shortest of three prefixes, which is found without
sorting: by bisection on an order-preserving integer image of the logit, and by id
among the tokens that share the logit at the end. Masses are those of the integer
row, whose sums do not depend on the order of summation.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.integer_rows import (
    TOTAL,
    full_width,
    integer_rows,
    row_powers,
    weights_of,
)
from pallas_kernels.locate import locate
from pallas_kernels.vocab_axis import lowest_id, row_max, row_sum, token_ids

# A limit that no mass and no count exceeds.
_OFF = 2**31 - 1


def argmax_ids(logits: jax.Array, axis_name: str | None = None) -> jax.Array:
    """Token of the largest logit, the lowest id on ties.

    Args:
      logits: float32[R, V].
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      int32[R], global ids; -1 for a row that holds NaN or +inf or nothing but -inf.
    """
    top = row_max(logits, axis_name)
    first = lowest_id(logits == top[:, None], axis_name)
    return jnp.where(jnp.isfinite(top), first, -1)


def filtered_logits(
    logits: jax.Array,
    scale: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    min_p: jax.Array,
    *,
    axis_name: str | None = None,
) -> jax.Array:
    """Logits with -inf where min-p, top-p or top-k cut a token.

    Args:
      logits: float32 or bfloat16[R, V]. -inf excludes a token.
      scale: float32[R], from `scale_of`.
      top_p: float32[R]. At least 1 is off.
      top_k: int32[R]. At most 0, or at least `V`, is off.
      min_p: float32[R]. 0 is off.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      [R, V] in the dtype of `logits`. The lowest id of the largest logit is always
      kept; a row that holds NaN keeps it.
    """
    width = full_width(logits, axis_name)
    wide = logits.astype(jnp.float32)
    power = row_powers(wide, scale, axis_name)
    mass = weights_of(power, width, axis_name=axis_name)
    keep = _nucleus(wide, mass, top_p, top_k, axis_name)
    # Powers are within 8 units, so that a token right at the limit stays.
    least = (jnp.clip(min_p, 0.0, 1.0) * 2.0**31).astype(jnp.uint32)
    keep &= power >= (jnp.maximum(least, 8) - 8)[:, None]
    lowest = jnp.asarray(-jnp.inf, logits.dtype)
    return jnp.where(keep | jnp.isnan(wide), logits, lowest)


def filtered_rows(
    logits: jax.Array,
    scale: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    min_p: jax.Array,
    *,
    axis_name: str | None = None,
) -> jax.Array:
    """`integer_rows` of `filtered_logits`, which see.

    Returns:
      int32[R, V]; exactly 0 outside the kept set, which is never empty unless the
      row has no law.
    """
    kept = filtered_logits(logits, scale, top_p, top_k, min_p, axis_name=axis_name)
    return integer_rows(kept, scale, axis_name=axis_name)


def _order_key(logits: jax.Array) -> jax.Array:
    """uint32 image of float32 that keeps the order; both zeros give one key."""
    logits = jnp.where(logits == 0, 0.0, logits)
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _nucleus(
    logits: jax.Array,
    mass: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    axis_name: str | None,
) -> jax.Array:
    """bool[R, V]. The tokens inside both the top-p and the top-k prefix.

    Both are one rule: keep a token while the amount strictly before it is at most a
    limit, the amount being mass against top_p or tokens against top_k - 1.
    """
    key = _order_key(logits)
    mass_limit = jnp.where(
        top_p < 1, (jnp.clip(top_p, 0.0, 1.0) * TOTAL).astype(jnp.int32), _OFF
    )
    count_limit = jnp.where(top_k > 0, top_k - 1, _OFF)

    def masses(selected: jax.Array) -> jax.Array:
        return row_sum(jnp.where(selected, mass, 0), axis_name)

    def tokens(selected: jax.Array) -> jax.Array:
        return row_sum(selected.astype(jnp.int32), axis_name)

    # The lowest key before which the amount is within the limit, bit by bit: it
    # lies at or above a candidate when the amount from the candidate up exceeds
    # the limit.
    def step(i, ends):
        mass_end, count_end = ends
        bit = jnp.uint32(1 << 31) >> i.astype(jnp.uint32)
        mass_try, count_try = mass_end | bit, count_end | bit
        mass_over = masses(key >= mass_try[:, None]) > mass_limit
        count_over = tokens(key >= count_try[:, None]) > count_limit
        return (
            jnp.where(mass_over, mass_try, mass_end),
            jnp.where(count_over, count_try, count_end),
        )

    start = jnp.zeros(key.shape[:1], jnp.uint32)
    mass_end, count_end = jax.lax.fori_loop(0, 32, step, (start, start))

    # How many of the tokens that share the last key fit behind its first.
    each = row_max(jnp.where(key == mass_end[:, None], mass, 0), axis_name)
    room = mass_limit - masses(key > mass_end[:, None])
    mass_fit = jnp.where(each > 0, room // jnp.maximum(each, 1), _OFF)
    count_fit = count_limit - tokens(key > count_end[:, None])

    end = jnp.maximum(mass_end, count_end)
    fit = jnp.minimum(
        jnp.where(mass_end == end, mass_fit, _OFF),
        jnp.where(count_end == end, count_fit, _OFF),
    )
    tied = key == end[:, None]
    last = locate(tied.astype(jnp.int32), fit, axis_name)
    ids = token_ids(key.shape[1], axis_name)
    return (key > end[:, None]) | (tied & (ids <= last[:, None]))
