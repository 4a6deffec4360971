"""From random 32-bit words to numbers.

Words are made outside and passed in, so the same code serves a seeded run and an
enumeration of every case in a test.
"""

import jax
import jax.numpy as jnp


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
