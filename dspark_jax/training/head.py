"""Output head, Markov bias and losses in one pass, for processors.

Logits of many rows over the draft's vocabulary are far larger than a cache, and
plain automatic differentiation moves them through memory several times. Here a
few rows at a time go all the way to their gradients. The values are those of
`losses.sparse_terms`.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

CHUNK = 160
LANES = 256


def _product(x: jax.Array, y: jax.Array, at: tuple[int, int]) -> jax.Array:
    dims = (((at[0],), (at[1],)), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


@jax.custom_vjp
def head_loss(
    hidden: jax.Array,
    latent: jax.Array,
    head: jax.Array,
    w2: jax.Array,
    ids: jax.Array,
    probs: jax.Array,
    ce_weights: jax.Array,
    l1_weights: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weighted sum of CE and L1 over rows.

    Args:
      hidden: float32[R, H]. Backbone rows after the final norm. Fastest when R
        is a multiple of the chunk.
      latent: float32[R, r]. Markov state z of each row; r may be 0.
      head: [V_draft, H]. Frozen; its dtype is that of all products.
      w2: [V_draft, r]. V_draft a multiple of 256.
      ids: int32[R, K]. Rows of the draft's vocabulary, -1 outside.
      probs: float32[R, K].
      ce_weights: float32[R].
      l1_weights: float32[R].

    Returns:
      (sum of weighted terms, ce float32[R], l1 float32[R]); the gradient flows
      from the sum to `hidden`, `latent` and `w2` only.
    """
    return _forward(hidden, latent, head, w2, ids, probs, ce_weights, l1_weights)[0]


def _forward(hidden, latent, head, w2, ids, probs, ce_weights, l1_weights):
    width = hidden.shape[1]
    x = jnp.concatenate([hidden, latent], axis=1).astype(head.dtype)
    table = jnp.concatenate([head, w2.astype(head.dtype)], axis=1)
    inside = ids >= 0
    rows = (x, jnp.maximum(ids, 0), jnp.where(inside, probs, 0.0), inside)
    rows = (*rows, ce_weights, l1_weights)
    chunk = math.gcd(CHUNK, x.shape[0])
    chunks = jax.tree.map(lambda a: a.reshape(-1, chunk, *a.shape[1:]), rows)
    one = functools.partial(_chunk, table, width)
    dw2, (ce, l1, dx) = jax.lax.scan(one, jnp.zeros(w2.shape, jnp.float32), chunks)
    ce, l1, dx = ce.reshape(-1), l1.reshape(-1), dx.reshape(x.shape)
    total = jnp.sum(ce * ce_weights + l1 * l1_weights)
    grads = dx[:, :width], dx[:, width:], dw2.astype(w2.dtype)
    return (total, ce, l1), grads


def _chunk(table, width, dw2, rows):
    x, ids, probs, inside, a, b = rows
    logits = _product(x, table, (1, 1))
    # Sums over leading axes are vectorised, sums over the last one are not.
    lanes = (len(x), -1, LANES)
    top = jnp.max(jnp.max(logits.reshape(lanes), axis=1), axis=1, keepdims=True)
    mass = jnp.exp(logits - top)
    total = jnp.sum(jnp.sum(mass.reshape(lanes), axis=1), axis=1, keepdims=True)
    log_q = jnp.take_along_axis(logits, ids, axis=1) - (top + jnp.log(total))
    q = jnp.where(inside, jnp.exp(log_q), 0.0)
    wanted = jnp.sum(probs, axis=1)
    ce = -jnp.sum(probs * log_q, axis=1)
    l1 = jnp.sum(jnp.abs(q - probs) - q, axis=1) + 2.0 - wanted
    slope = jnp.sign(q - probs) - 1.0
    common = a * wanted - b * jnp.sum(slope * q, axis=1)
    own = b[:, None] * slope * q - a[:, None] * probs
    dense = mass * (common[:, None] / total)
    row = jnp.arange(len(x), dtype=jnp.int32)[:, None]
    dlogits = dense.astype(table.dtype).at[row, ids].add(own.astype(table.dtype))
    dx = _product(dlogits, table, (1, 0))
    dw2 = dw2 + _product(dlogits, x[:, width:], (0, 0))
    return dw2, (ce, l1, dx)


def _backward(grads, cotangents):
    scale = cotangents[0]
    dh, de, dw2 = grads
    dw2 = (dw2.astype(jnp.float32) * scale).astype(dw2.dtype)
    return dh * scale, de * scale, None, dw2, None, None, None, None


head_loss.defvjp(_forward, _backward)
