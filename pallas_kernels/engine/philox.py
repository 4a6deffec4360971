"""Philox4x32-10, a counter-based random generator, in 32-bit integers.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". Four words of a
counter go through ten rounds of two multiplications each; the key changes by a
constant from round to round. Every (key, counter) has its four output words at once,
so that any part of any stream can be computed without what lies before it.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.fixed_point import high_word

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
# Added to the key after each round: the golden ratio and sqrt(3) - 1, in 2^-32.
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox4x32(key: jax.Array, counter: jax.Array) -> jax.Array:
    """Four random words for each key and counter.

    Args:
      key: uint32[..., 2], low word first. A 64-bit seed.
      counter: uint32[..., 4] with the same leading axes: block low, block high,
        sequence low, sequence high.

    Returns:
      uint32[..., 4], to be consumed in order.
    """
    first, second = (jnp.uint32(m) for m in MULTIPLIERS)
    steps = [jnp.uint32(s) for s in KEY_STEPS]

    def one_round(_, state):
        (a, b, c, d), (low, high) = state
        words = (
            high_word(c, second) ^ b ^ low,
            c * second,
            high_word(a, first) ^ d ^ high,
            a * first,
        )
        return words, (low + steps[0], high + steps[1])

    words = tuple(counter[..., i] for i in range(4))
    keys = (key[..., 0], key[..., 1])
    words, _ = jax.lax.fori_loop(0, ROUNDS, one_round, (words, keys))
    return jnp.stack(words, -1)
