"""Which random words belong to which draw in the reference engine.

A stream is the words of one 64-bit sequence number under one 64-bit seed, from block
0 on, four words a block.

    draw                     seed                          sequence
    token of a fresh row     seed                          3 position + 0
    replacement              seed                          3 position + 1
    accept uniform           seed                          3 position + 2
    draft token              seed + 1000000007 mod 2^64    3 position + 0

`position` is the prompt's length for the token after the prompt, `decode_position` for
a row that is verified, `draft_position` for a draft.

Properties to know, none of which this library's own streams (seed, committed length,
step, purpose) have:

* A verified row is not indexed by its token's place in the text: row j of a step adds
  j * 10000019. So the token with index 20 has other words in a step that begins at 20
  than in one that began at 18, and a seed fixes the text only if the steps begin at the
  same places, that is, for a fixed number of drafts.
* A draft is indexed by its place in the text alone: two rounds that propose for one
  place use the same words. That is harmless where the earlier proposal was dropped
  without influence; where it helped to choose a number of drafts, it biases the text.
* Requests with equal seeds share all words. If one seed is the other plus 1000000007,
  the fresh tokens of the one and the drafts of the other share theirs.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.engine.philox import philox4x32
from pallas_kernels.fixed_point import high_word

# What a stream is for: its place among the three of a position.
FRESH, REPLACEMENT, ACCEPT = range(3)
STREAMS = 3
DRAFT_SEED_OFFSET = 1_000_000_007
STEP_STRIDE = 10_000_019


def decode_position(base: jax.Array, step: jax.Array) -> jax.Array:
    """Stream position of a row that is verified, or fresh, in a decode step.

    Args:
      base: int32[...]. Index of the first token that the step can emit.
      step: int32[...]. The row's place in the step, 0 .. 213: from 214 on the result
        may not fit.

    Returns:
      int32[...], base + step * 10000019; at step 0 the index of the row's token.
    """
    return base + step * STEP_STRIDE


def draft_position(base: jax.Array, accepted: jax.Array, step: jax.Array) -> jax.Array:
    """Stream position of a draft: the index of its token in the text.

    Args:
      base: int32[...]. Index of the first token that the last step could emit.
      accepted: int32[...]. Drafts which that step accepted; it emitted one more token.
      step: int32[...]. The draft's place in the new proposal, from 0.

    Returns:
      int32[...], base + accepted + 1 + step.
    """
    return base + accepted + 1 + step


def draft_seed(seed: jax.Array) -> jax.Array:
    """Seed of the draft's streams: seed + 1000000007 modulo 2^64.

    Args:
      seed: uint32[..., 2], low word first. The request's seed.

    Returns:
      uint32[..., 2], low word first.
    """
    low = seed[..., 0] + jnp.uint32(DRAFT_SEED_OFFSET)
    carry = (low < seed[..., 0]).astype(jnp.uint32)
    return jnp.stack([low, seed[..., 1] + carry], -1)


def sequence_number(position: jax.Array, stream: jax.Array | int) -> jax.Array:
    """3 position + stream as a 64-bit number.

    Args:
      position: int32[...], at least 0.
      stream: `FRESH`, `REPLACEMENT` or `ACCEPT`, or int32[...] like `position`.

    Returns:
      uint32[..., 2], low word first.
    """
    position, streams = position.astype(jnp.uint32), jnp.uint32(STREAMS)
    product = position * streams
    low = product + jnp.asarray(stream, jnp.uint32)
    carry = (low < product).astype(jnp.uint32)
    return jnp.stack([low, high_word(position, streams) + carry], -1)


def stream_block(
    seed: jax.Array,
    position: jax.Array,
    stream: jax.Array | int,
    block: jax.Array | int,
) -> jax.Array:
    """Four words of a stream.

    Args:
      seed: uint32[..., 2], low word first.
      position: int32[...], at least 0.
      stream: `FRESH`, `REPLACEMENT` or `ACCEPT`, or int32[...] like `position`.
      block: uint32 scalar or int, from 0. The high word of the block number stays 0.

    Returns:
      uint32[..., 4], words 4 block .. 4 block + 3.
    """
    number = sequence_number(position, stream)
    low = jnp.full(position.shape, block, jnp.uint32)
    blocks = jnp.stack([low, jnp.zeros_like(low)], -1)
    return philox4x32(seed, jnp.concatenate([blocks, number], -1))


def stream_words(
    seed: jax.Array, position: jax.Array, stream: jax.Array | int, count: int
) -> jax.Array:
    """The first words of a stream.

    Args:
      seed: uint32[..., 2], low word first.
      position: int32[...], at least 0.
      stream: `FRESH`, `REPLACEMENT` or `ACCEPT`, or int32[...] like `position`.
      count: static, at least 1.

    Returns:
      uint32[..., count].
    """
    blocks = [stream_block(seed, position, stream, i) for i in range(-(-count // 4))]
    return jnp.concatenate(blocks, -1)[..., :count]


def uniform(words: jax.Array) -> jax.Array:
    """The engine's uniform number, in (0, 1].

    0 never comes, and 1 from the 128 highest words, with probability 2^-25. With
    `u < 1` those words reject a draft whose acceptance is 1.

    Args:
      words: uint32[...].

    Returns:
      float32[...], float32(word) * 2^-32 + 2^-33 in float32.
    """
    return words.astype(jnp.float32) * jnp.float32(2.0**-32) + jnp.float32(2.0**-33)
