"""Random words of a round, from (seed, committed length, local step, purpose).

The committed length grows every round, so no word is ever drawn twice: not
between rounds, purposes or positions, and a request's words depend on its seed
and its own progress only, never on its neighbours.

Shared noise is the exception: its keys come from (seed, position), the same for the
draft and every row that judges it, however often a position is drafted.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

# Purposes of a draw.
FRESH, DRAFT, NOISE = range(3)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["fresh", "draft"],
    meta_fields=[],
)
@dataclass(frozen=True)
class RoundWords:
    """Words for one round of up to n drafts.

    A verdict and what replaces a draft that falls follow from the point that the
    draft was drawn by, and need no word of their own.

    Attributes:
      fresh: uint32[B, n + 1]. Token of a fresh row at local step j.
      draft: uint32[B, n + 2, n]. Next proposal, for every number of tokens
        (0..n + 1) that the round may commit.

    With shared noise both have two words, uint32[..., 2]: the key of the position
    that a token is for, on every row.
    """

    fresh: jax.Array
    draft: jax.Array


def seed_words(seed: int) -> tuple[int, int]:
    """A 64-bit seed as two words, high first."""
    return seed >> 32, seed & 0xFFFFFFFF


def fold_seeds(seed: int, count: int) -> jax.Array:
    """uint32[count, 2]: one seed a prompt of the caller's list."""
    high, low = seed_words(seed)
    key = _key(jnp.asarray([high, low], jnp.uint32))
    fold = jax.vmap(lambda i: jax.random.fold_in(key, i))
    return jax.random.key_data(fold(jnp.arange(count, dtype=jnp.uint32)))


def round_words(
    seeds: jax.Array, committed: jax.Array, length: int, noisy: bool = False
) -> RoundWords:
    """Words for a round that starts at `committed` tokens.

    Args:
      seeds: uint32[B, 2].
      committed: int32[B]. Prompt and emitted tokens, anchor included.
      length: n, drafts a round.
      noisy: static; keys of shared noise instead.
    """
    if noisy:
        return _noise_keys(seeds, committed, length)
    steps = jnp.arange(length + 1, dtype=jnp.uint32)

    def one(seed: jax.Array, committed: jax.Array) -> RoundWords:
        def draw(at: jax.Array, purpose: int, count: int) -> jax.Array:
            base = jax.random.fold_in(_key(seed), at)

            def word(step: jax.Array) -> jax.Array:
                key = jax.random.fold_in(base, step)
                return jax.random.bits(jax.random.fold_in(key, purpose))

            return jax.vmap(word)(steps[:count])

        later = committed + jnp.arange(length + 2, dtype=jnp.uint32)
        return RoundWords(
            fresh=draw(committed, FRESH, length + 1),
            draft=jax.vmap(lambda at: draw(at, DRAFT, length))(later),
        )

    return jax.vmap(one)(seeds, committed.astype(jnp.uint32))


def _noise_keys(seeds: jax.Array, committed: jax.Array, length: int) -> RoundWords:
    def key(seed: jax.Array, position: jax.Array) -> jax.Array:
        base = jax.random.fold_in(_key(seed), position)
        return jax.random.key_data(jax.random.fold_in(base, NOISE))

    # Row j of a round is for position committed + j, and so is draft j.
    step = jnp.arange(length + 1, dtype=jnp.uint32)
    later = jnp.arange(length + 2, dtype=jnp.uint32)[:, None] + step[None, :length]

    def one(seed: jax.Array, at: jax.Array) -> RoundWords:
        of = jax.vmap(functools.partial(key, seed))
        return RoundWords(of(at + step), jax.vmap(of)(at + later))

    return jax.vmap(one)(seeds, committed.astype(jnp.uint32))


def _key(seed: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(seed, impl="threefry2x32")
