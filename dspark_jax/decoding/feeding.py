"""Prompts of several requests through the compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.programs import Programs
from dspark_jax.decoding.publishing import RoundOut
from dspark_jax.decoding.requests import Requests, Variant, holds_rows, is_noisy
from dspark_jax.decoding.shapes import Shapes
from dspark_jax.decoding.state import RUNNING, STOP, DecodeState, new_counters
from dspark_jax.models import family
from dspark_jax.models.params import Tree
from dspark_jax.scheduling.policy import Scheduled
from dspark_jax.settings import Buckets
from dspark_jax.spec import Spec


def prefill(
    spec: Spec,
    params: Tree,
    programs: Programs,
    state: DecodeState,
    requests: Requests,
    variant: Variant,
    policy: Scheduled | None,
    pending: Sequence[Sequence[int]],
    starts: Sequence[int],
    budgets: Sequence[int],
    masks: np.ndarray | None = None,
    shapes: Shapes | None = None,
) -> tuple[DecodeState, RoundOut]:
    """Feeds new tokens of requests and draws the first token after them.

    Args:
      spec: the model.
      params: its parameters.
      programs: its compile table.
      state: B requests, donated.
      requests: settings of them.
      variant: what the rounds behind can do.
      policy: of the rounds; None where lengths are fixed.
      pending: ids to feed; requests beyond the list are idle.
      starts: positions that each of them has cached.
      budgets: tokens each may emit.
      masks: for the first tokens, see `prefill.begin`.
      shapes: sizes to keep to.

    Returns:
      (state ready for rounds, what was drawn).
    """
    size, count = state.anchor.shape[0], len(pending)
    length = np.zeros((size,), np.int32)
    budget = np.zeros((size,), np.int32)
    finish = np.full((size,), STOP, np.int32)
    length[:count], budget[:count], finish[:count] = starts, budgets, RUNNING
    n = state.counters.kept.shape[1]
    state = dataclasses.replace(
        state,
        length=jnp.asarray(length),
        budget=jnp.asarray(budget),
        finish=jnp.asarray(finish),
        proposal=None,
        memory=None,
        counters=_zero_counters(size, n),
    )
    logits = jnp.asarray(np.zeros((size, spec.target.vocab_size), np.float32))
    sizes = shapes.prefill if shapes else Buckets().prefill
    target = family.target_of(spec.target)
    state, logits = _feed(
        target, params, programs, state, logits, pending, length, sizes
    )
    state, out = programs.begin(
        params, state, logits, requests, is_noisy(variant), policy, masks
    )
    if not holds_rows(variant) and state.proposal is not None:
        # Greedy rounds carry no laws.
        proposal = dataclasses.replace(state.proposal, weights=None, offset=None)
        state = dataclasses.replace(state, proposal=proposal)
    return state, out


def _feed(
    target: family.Target,
    params: Tree,
    programs: Programs,
    state: DecodeState,
    logits: jax.Array,
    pending: Sequence[Sequence[int]],
    starts: np.ndarray,
    sizes: Sequence[int],
) -> tuple[DecodeState, jax.Array]:
    """Feeds chunk by chunk; every chunk's window lies inside the cache.

    The smallest chunk is no longer than a tile, so it always fits.
    """
    lengths, done = starts.copy(), [0] * len(pending)
    while True:
        left = max(len(p) - d for p, d in zip(pending, done, strict=True))
        if left == 0:
            return state, logits
        at, fit = int(lengths.max()), target.chunk_fits
        fits = [n for n in sizes if fit(at, n, state.capacity)]
        width = Buckets.fit(left, fits) or fits[-1]
        chunk = np.zeros((len(starts), width), np.int32)
        counts = np.zeros((len(starts),), np.int32)
        for row, ids in enumerate(pending):
            part = ids[done[row] : done[row] + width]
            chunk[row, : len(part)] = part
            counts[row] = len(part)
            done[row] += len(part)
        state, logits = programs.feed(
            params, state, logits, jnp.asarray(chunk), jnp.asarray(counts)
        )
        lengths += counts


def _zero_counters(batch: int, draft_length: int):
    """Zero counters without compiling anything."""
    shapes = jax.eval_shape(lambda: new_counters(batch, draft_length))
    return jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), shapes)
