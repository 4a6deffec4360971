"""Rows through the target, and what it says about the drafts in them.

All rows of a round, or as few of them as hold the real ones: a round whose lengths
are decided on the device picks one of several row counts at run time, and everything
behind the target is as wide as the largest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dspark_jax.decoding import laws
from dspark_jax.decoding.masks import masked
from dspark_jax.decoding.requests import Requests, Variant
from dspark_jax.decoding.words import RoundWords
from dspark_jax.models import family
from dspark_jax.models.draft.proposal import Proposal, spread
from dspark_jax.models.params import Tree
from dspark_jax.models.rows import Rows, first_rows
from dspark_jax.spec import Spec
from pallas_kernels.verify import VerifiedRows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["verdict", "scores", "doubt", "features", "pending"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Judged:
    """What a round's rows gave.

    Attributes:
      verdict: on every row.
      scores: float32[G]. Log-probability of each row's token; None unless wanted.
      doubt: float32[G]. Distance of each row's two highest logits; None unless wanted.
      features: float32[G, m * H]. For the draft.
      pending: what the rows add to the target's state, should they stand.
    """

    verdict: VerifiedRows
    scores: jax.Array | None
    doubt: jax.Array | None
    features: jax.Array
    pending: family.State


@dataclass(frozen=True)
class Wanted:
    """Static: what is computed beside verdicts."""

    features: bool = False
    scores: bool = False
    doubt: bool = False


def judge(
    spec: Spec,
    params: Tree,
    *,
    cache: family.State,
    capacity: int,
    rows: Rows,
    is_verify: jax.Array,
    proposal: Proposal | None,
    requests: Requests,
    words: RoundWords,
    variant: Variant,
    wanted: Wanted,
    masks: jax.Array | None = None,
) -> Judged:
    """Evaluates rows and judges the drafts in them.

    Args:
      spec: the model.
      params: its parameters.
      cache: the target's state.
      capacity: C.
      rows: G rows; row j of a request judges draft j or is its fresh row.
      is_verify: bool[G]. False for fresh rows.
      proposal: the drafts; None when there are none.
      requests: settings.
      words: of the round.
      variant: what the program can do.
      wanted: see there.
      masks: uint32[B, n + 1, W]. Tokens that row j of a request may emit, see
        `masks`; None: all of them. Scores and doubt are the unmasked target's.
    """
    taps = spec.taps if wanted.features else ()
    logits, features, pending = family.target_of(spec.target).evaluate(
        spec.target, params["target"], cache, capacity, rows, taps, mesh=spec.mesh
    )
    logits = spec.shard(logits, "batch", "vocab")
    fresh = words.fresh[rows.request, rows.local_step]
    if proposal is None or spec.draft is None:
        ids, drawn = jnp.full_like(rows.token, -1), None
    else:
        n = proposal.ids.shape[1]
        slot = rows.request * n + jnp.minimum(rows.local_step, n - 1)

        def flat(x: jax.Array) -> jax.Array:
            return x.reshape(-1, *x.shape[2:])

        def per_row(x: jax.Array) -> jax.Array:
            return jnp.take(flat(x), slot, axis=0, mode="clip")

        ids, drawn = per_row(proposal.ids), None
        if proposal.weights is not None and proposal.offset is not None:
            d2t = params["draft"].get("d2t")
            drafted = spread(flat(proposal.weights), d2t, spec.target.vocab_size)
            drawn = (drafted, slot, per_row(proposal.offset))
    lawful = logits
    if masks is not None:
        lawful = masked(spec, logits, masks[rows.request, rows.local_step])
    verdict = laws.verify(
        spec, variant, lawful, requests, rows.request, ids, drawn, is_verify, fresh
    )
    scores = laws.log_probabilities(logits, verdict.token) if wanted.scores else None
    doubt = laws.doubt(logits) if wanted.doubt else None
    return Judged(verdict, scores, doubt, features, pending)


def judge_in_buckets(
    buckets: Sequence[int],
    count: jax.Array,
    rows: Rows,
    is_verify: jax.Array,
    one: Callable[..., Judged],
) -> Judged:
    """`judge` on the smallest bucket that holds all real rows.

    Args:
      buckets: static, increasing; the last one is `len(rows.token)`.
      count: int32[]. Real rows; they come first.
      rows: G rows, the largest bucket.
      is_verify: bool[G].
      one: `judge` but for its rows and `is_verify`, as keyword arguments.

    Returns:
      Judged with G rows; those behind the bucket hold zeros.
    """

    def branch(size: int):
        def run() -> Judged:
            out = one(rows=first_rows(rows, size), is_verify=is_verify[:size])

            def wide(x: jax.Array) -> jax.Array:
                pad = [(0, buckets[-1] - size)] + [(0, 0)] * (x.ndim - 1)
                return jnp.pad(x, pad)

            narrow = dataclasses.replace(out, pending={})
            return dataclasses.replace(jax.tree.map(wide, narrow), pending=out.pending)

        return run

    index = jnp.sum(count > jnp.asarray(buckets[:-1], jnp.int32), dtype=jnp.int32)
    return jax.lax.switch(index, [branch(size) for size in buckets])
