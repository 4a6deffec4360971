"""Token masks: which tokens the target may emit, one bit each.

    token        0 1 2 .. 31 | 32 ..        bit i % 32 of word i // 32; set: allowed
    mask         uint32[W], W = ceil(V / 32); bits from V on mean nothing

A mask changes the target's law P only: excluded tokens get logits of -inf before
temperature and filters. The draft's law Q stays as it is, so that the rule, which is
lossless for any P and Q, is lossless with respect to the masked P.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.laws import over_vocabulary
from dspark_jax.spec import Spec
from pallas_kernels.vocab_axis import token_ids

BITS = 32
# Every token is allowed.
FREE = np.uint32(0xFFFFFFFF)


def words_of(vocab: int) -> int:
    """W, the words of a mask over `vocab` tokens."""
    return -(-vocab // BITS)


def packed(allowed: np.ndarray) -> np.ndarray:
    """bool[..., V] -> uint32[..., W], on the host."""
    vocab = allowed.shape[-1]
    room = [(0, 0)] * (allowed.ndim - 1) + [(0, words_of(vocab) * BITS - vocab)]
    octets = np.packbits(np.pad(allowed, room), axis=-1, bitorder="little")
    return octets.view("<u4").astype(np.uint32)


def packed_in_program(allowed: jax.Array) -> jax.Array:
    """bool[B, V] -> uint32[B, W], traced."""
    batch, vocab = allowed.shape
    words = words_of(vocab)
    wide = jnp.pad(allowed, ((0, 0), (0, words * BITS - vocab)))
    bits = wide.reshape(batch, words, BITS).astype(jnp.uint32)
    return jnp.sum(bits << _places(), 2, dtype=jnp.uint32)


def check_masks(spec: Spec, masks: jax.Array, *lead: int) -> None:
    """Raises ValueError unless `masks` is uint32[*lead, W]."""
    shape = (*lead, words_of(spec.target.vocab_size))
    if masks.shape != shape or masks.dtype != jnp.uint32:
        raise ValueError(
            f"`masks` is {masks.dtype}{list(masks.shape)}; it must be "
            f"uint32{list(shape)}, one bit a token"
        )


def masked(spec: Spec, logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Logits with -inf where a token is not allowed.

    Args:
      spec: gives the mesh.
      logits: float32[R, V].
      masks: uint32[R, W]. A row without an allowed token has no finite logit, and
        every way of choosing answers -1.

    Returns:
      float32[R, V].
    """

    def op(logits: jax.Array, masks: jax.Array, *, axis_name: str | None):
        rows, width = logits.shape
        bits = masks[:, :, None] >> _places()
        bits = (bits & 1).astype(bool).reshape(rows, -1)
        if axis_name is None:
            mine = bits[:, :width]
        else:
            first = token_ids(width, axis_name)[0, 0]
            mine = jax.lax.dynamic_slice_in_dim(bits, first, width, axis=1)
        return jnp.where(mine, logits, -jnp.inf)

    return over_vocabulary(spec, op, [logits], [masks], True)


def _places() -> jax.Array:
    """uint32[1, 1, 32]: 0 .. 31."""
    return jnp.arange(BITS, dtype=jnp.uint32)[None, None]
