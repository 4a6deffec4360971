"""Gumbel noise in integers, and the token that wins with it.

The token of a position is the argmax of log-probability plus noise, where the noise
depends on a key and the token id alone. A draft and its target that use the same key
for the same position then mostly pick the same token, and what the target picks does
not depend on what was drafted: not on its length, the batch or the schedule.

This is the Gumbel-max rule. The law of the token is the softmax of the logits but for
the resolution of the noise: a token of probability p is off by at most about
2^-31 / p of itself, and by 1e-6 of itself from the logarithms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.fixed_point import NEVER, part
from pallas_kernels.integer_rows import token_exponents
from pallas_kernels.vocab_axis import lowest_id, row_max, token_ids

# log2(1 + t) / t on [0, 1] as an alternating polynomial of t, in units of 2^-30;
# least maximum error of log2 (4.7e-8) at degree 8.
_LOG2 = (
    1_549_076_464,
    774_345_886,
    513_982_694,
    372_911_644,
    259_700_199,
    147_662_269,
    55_897_828,
    9_995_613,
)
# log2(-log2(1 - s / 2) / (s / 2)) on [0, 1], in units of 2^-30: least maximum error
# (2.4e-7) at degree 7 without a negative coefficient.
_TAIL = (
    567_758_839,
    387_245_425,
    81_006_525,
    22_690_383,
    11_403_381,
    1_332_963,
    0,
    2_304_054,
)
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: jax.Array, counter: jax.Array) -> jax.Array:
    """One random word a counter: Threefry-2x32 with 20 rounds.

    Args:
      key: uint32[..., 2].
      counter: uint32[...], broadcast against the keys.

    Returns:
      uint32[...], the exclusive or of both words of the block (0, counter), as
      `jax.random.bits` makes them.
    """
    first, second = key[..., 0], key[..., 1]
    keys = (first, second, first ^ second ^ jnp.uint32(0x1BD11BDA))
    x, y = first + jnp.zeros_like(counter), second + counter
    for i in range(5):
        for bits in _ROTATIONS[i % 2]:
            x = x + y
            y = ((y << bits) | (y >> (32 - bits))) ^ x
        x = x + keys[(i + 1) % 3]
        y = y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x ^ y


def log2(value: jax.Array) -> jax.Array:
    """Binary logarithm.

    Args:
      value: uint32[...], at least 1.

    Returns:
      int32[...] in units of 2^-24; off by at most 3 units.
    """
    whole = jnp.uint32(31) - jax.lax.clz(value)
    fraction = (value << (jnp.uint32(31) - whole)) << 1
    curve = jnp.uint32(_LOG2[-1])
    for coefficient in _LOG2[-2::-1]:
        curve = jnp.uint32(coefficient) - part(curve, fraction)
    return ((whole << 24) + (part(curve, fraction) >> 6)).astype(jnp.int32)


def gumbel(word: jax.Array) -> jax.Array:
    """Standard Gumbel noise in octaves, -log2(-log2(u)) for u of (0, 1).

    Noise of one octave doubles a token's share, as logits do in log2 units.

    Args:
      word: uint32[...]. Uniform; 1 - u is the odd number at or below it, in units of
        2^-32, so that u is never 0 or 1.

    Returns:
      int32[...] in units of 2^-20, between -5.05 and 31.6 octaves.
    """
    odd = word | jnp.uint32(1)
    small = odd < jnp.uint32(1 << 31)
    # Where 1 - u is small, -log2(u) is (1 - u) times a smooth function; elsewhere
    # u is small and its logarithm exact enough.
    twice = jnp.where(small, odd, jnp.uint32(0)) << 1
    curve = jnp.uint32(_TAIL[-1])
    for coefficient in _TAIL[-2::-1]:
        curve = jnp.uint32(coefficient) + part(curve, twice)
    near = log2(jnp.where(small, odd, jnp.uint32(1))) + (curve >> 6).astype(jnp.int32)
    rest = jnp.where(small, jnp.uint32(1), ~odd + jnp.uint32(1))
    wide = ((32 << 24) - log2(rest)).astype(jnp.uint32)
    far = log2(wide)
    octaves = jnp.where(small, near - (32 << 24), far - (24 << 24))
    return -(octaves >> 4)


def noisy_argmax(
    logits: jax.Array,
    scale: jax.Array,
    keys: jax.Array,
    ids: jax.Array | None = None,
    *,
    axis_name: str | None = None,
) -> jax.Array:
    """The token that wins with the noise of its row's key.

    Args:
      logits: float32 or bfloat16[R, V]. -inf excludes a token.
      scale: float32[R], from `scale_of`; 0 takes the argmax, whatever the noise.
      keys: uint32[R, 2]. One key a position.
      ids: int32[R, V]. Ids by which the noise is drawn, where columns are not ids:
        a reduced vocabulary. None: the columns' own.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      int32[R], global columns; the lowest one on ties, -1 for a row that holds NaN or
      +inf or nothing but -inf.
    """
    logits = logits.astype(jnp.float32)
    columns = token_ids(logits.shape[1], axis_name)
    top = row_max(logits, axis_name)
    first = lowest_id(logits == top[:, None], axis_name)
    exponent = token_exponents(
        logits, columns, top[:, None], first[:, None], scale[:, None]
    )
    names = columns if ids is None else ids
    word = threefry(keys[:, None, :], names.astype(jnp.uint32))
    # No noise lifts an excluded token above the top one.
    score = jnp.where(exponent <= NEVER, NEVER * 2, exponent + gumbel(word))
    best = row_max(score, axis_name)
    winner = lowest_id(score == best[:, None], axis_name)
    return jnp.where(best > NEVER, winner, -1)
