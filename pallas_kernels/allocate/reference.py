"""Allocation by rank: the likeliest drafts of all requests win the rows."""

import jax
import jax.numpy as jnp


def survival(confidence: jax.Array) -> jax.Array:
    """See `pallas_kernels.allocate.survival`."""

    def step(alive: jax.Array, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        alive = alive * c
        return alive, alive

    # Left to right, so that every device rounds alike.
    start = jnp.ones(confidence.shape[:1], confidence.dtype)
    _, products = jax.lax.scan(step, start, confidence.T)
    return products.T


def allocate(values: jax.Array, total: jax.Array) -> jax.Array:
    """See `pallas_kernels.allocate.allocate`."""
    requests, drafts = values.shape
    # Floats >= 0 are in the order of their bits, and integers sort several times
    # faster. One kind of zero; anything negative comes last.
    bits = jax.lax.bitcast_convert_type(values.reshape(-1), jnp.int32)
    key = jnp.where(values.reshape(-1) == 0, 0, -bits)
    # A stable sort keeps equal values in flat order.
    order = jnp.argsort(key, stable=True)
    places = jnp.arange(requests * drafts, dtype=jnp.int32)
    rank = jnp.zeros_like(places).at[order].set(places)
    wins = rank.reshape(requests, drafts) < total - requests
    return 1 + wins.sum(1).astype(jnp.int32)
