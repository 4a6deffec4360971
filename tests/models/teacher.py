"""Rounds of a recorded trace, all at once, with the recorded tokens.

All rounds are evaluated as one batch. Each of its requests has the context of the
whole trace in its cache, so what lies behind a round's anchor is really there and
has to be masked.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.models import dense
from dspark_jax.models.draft import backbone
from dspark_jax.models.draft.proposal import propose
from dspark_jax.models.kv_cache import Cache, empty_cache
from dspark_jax.models.rows import dense_rows
from pallas_kernels import argmax_ids
from tests.models.goldens import pair
from tests.models.quick import quick_jit

# Rounds and context rows that every trace is padded to.
ROUNDS, CONTEXT = 24, 128


def _for_all_rounds(cache: Cache) -> Cache:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (ROUNDS, *x.shape[1:])), cache)


@functools.partial(quick_jit, static_argnums=0)
def _draft(spec, params, features, anchor, start, forced):
    config, draft, target = spec.draft, params["draft"], params["target"]
    cache = backbone.empty_context(config, 1, CONTEXT, jnp.dtype("float32"))
    zero = jnp.zeros((1,), jnp.int32)
    rows = dense_rows(jnp.zeros((1, CONTEXT), jnp.int32), zero + CONTEXT, zero)
    cache = backbone.inject(config, draft, cache, features, rows, zero + CONTEXT)
    cache = _for_all_rounds(cache)

    def choose(logits, words):
        wanted = words.astype(jnp.int32)
        return jnp.where(wanted > 0, wanted - 1, argmax_ids(logits)), None, None

    hidden, _ = backbone.block_rows(
        config, draft, target, cache, CONTEXT, anchor, start
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    base = backbone.base_logits(config, draft, target, flat)
    proposal, corrected = propose(
        config, draft, target, cache, CONTEXT, anchor, start, forced, choose
    )
    return hidden, base.reshape(*hidden.shape[:2], -1), corrected, proposal


@functools.partial(quick_jit, static_argnums=0)
def _verify(config, params, tokens, blocks, lengths, start):
    cache = empty_cache(config, 1, CONTEXT, jnp.dtype("float32"), False)
    zero = jnp.zeros((1,), jnp.int32)
    rows = dense_rows(tokens, zero + CONTEXT, zero)
    _, _, pending = dense.evaluate(config, params, cache, CONTEXT, rows)
    cache = _for_all_rounds(dense.commit(config, cache, pending, zero, zero + CONTEXT))
    rows = dense_rows(blocks, lengths, start)
    logits, _, _ = dense.evaluate(config, params, cache, CONTEXT, rows)
    return logits.reshape(*blocks.shape, -1)


def _pad(x: np.ndarray, length: int) -> np.ndarray:
    return np.pad(x, [(0, length - len(x))] + [(0, 0)] * (x.ndim - 1))


def draft_rounds(name: str, trace: dict[str, np.ndarray], forced: bool = False):
    """(block hidden, base logits, corrected logits, proposal) of every round.

    Args:
      name: entry of `DRAFTS`.
      trace: its trace.
      forced: draft the recorded tokens instead of the most likely ones.
    """
    wanted = trace["draft_tokens"] + 1 if forced else 0 * trace["draft_tokens"]
    out = _draft(
        pair(name).spec,
        pair(name).params,
        _pad(trace["ctx_features"], CONTEXT),
        _pad(trace["anchor_token"], ROUNDS),
        _pad(trace["start"], ROUNDS),
        _pad(wanted.astype(np.uint32), ROUNDS),
    )
    return jax.tree.map(lambda x: np.asarray(x)[: len(trace["start"])], out)


def verify_rounds(name: str, trace: dict[str, np.ndarray]) -> np.ndarray:
    """float32[N, gamma + 1, V]. Target logits of the recorded blocks."""
    blocks = np.maximum(trace["verify_input_ids"], 0)
    logits = _verify(
        pair(name).spec.target,
        pair(name).params["target"],
        _pad(trace["output_ids"], CONTEXT)[None],
        _pad(blocks, ROUNDS),
        _pad(trace["proposal_len"] + 1, ROUNDS),
        _pad(trace["start"], ROUNDS),
    )
    return np.asarray(logits)[: len(trace["start"])]
