"""Publication on the padded layout, in plain array operations."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Published(NamedTuple):
    """What `B` requests emit in one round of at most `T` tokens.

    emitted: int32[B, T]. Emitted tokens from the left, -1 behind them.
    n_emitted: int32[B]. How many.
    n_accepted: int32[B]. Accepted prefix as verified, before any cut: the number of
      drafts whose keys and values are right.
    n_kept_drafts: int32[B]. Accepted drafts that were really emitted.
    stopped: bool[B]. A stop id was emitted.
    next_token: int32[B]. Last emitted token; 0 where none was.
    """

    emitted: jax.Array
    n_emitted: jax.Array
    n_accepted: jax.Array
    n_kept_drafts: jax.Array
    stopped: jax.Array
    next_token: jax.Array


def publish(
    accept: jax.Array,
    token: jax.Array,
    draft_ids: jax.Array,
    n_drafts: jax.Array,
    stop_ids: jax.Array,
    remaining: jax.Array,
    active: jax.Array,
) -> Published:
    """See `pallas_kernels.publish.publish`."""
    batch, width = token.shape
    column = jnp.arange(width, dtype=jnp.int32)[None, :]

    stands = accept & (column < n_drafts[:, None])
    n_accepted = jnp.where(stands, width, column).min(1)
    final = jnp.take_along_axis(token, n_accepted[:, None], axis=1)
    drafts = jnp.pad(draft_ids, ((0, 0), (0, 1)), constant_values=-1)
    at_final = column == n_accepted[:, None]
    line = jnp.where(at_final, final, drafts)

    is_stop = (line[:, :, None] == stop_ids[:, None, :]) & (stop_ids >= 0)[:, None, :]
    is_stop = is_stop.any(2) & (column <= n_accepted[:, None])
    first_stop = jnp.where(is_stop, column, width).min(1)

    length = jnp.minimum(n_accepted, first_stop) + 1
    length = jnp.minimum(length, jnp.maximum(remaining, 0))
    length = jnp.where(active, length, jnp.zeros_like(length))

    emitted = jnp.where(column < length[:, None], line, -1)
    last = jnp.take_along_axis(line, jnp.maximum(length - 1, 0)[:, None], axis=1)
    return Published(
        emitted=emitted,
        n_emitted=length,
        n_accepted=jnp.where(active, n_accepted, jnp.zeros_like(n_accepted)),
        n_kept_drafts=jnp.minimum(n_accepted, length),
        stopped=first_stop < length,
        next_token=jnp.where(length > 0, last[:, 0], jnp.zeros((batch,), jnp.int32)),
    )
