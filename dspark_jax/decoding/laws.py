"""From logits to laws and tokens, whole or split over the vocabulary.

With a "tensor" axis in the mesh the ops run inside `jax.shard_map`, each device
on its own share of the vocabulary, and exchange a few numbers a row: no
`[rows, V]` array is gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dspark_jax.decoding.requests import Requests, Variant
from dspark_jax.spec import Spec
from pallas_kernels import argmax_ids, draw, filtered_rows, integer_rows, points
from pallas_kernels.verify import VerifiedRows, verify_greedy, verify_rows


def over_vocabulary(
    spec: Spec,
    op: Callable[..., Any],
    split: Sequence[jax.Array],
    whole: Sequence[jax.Array],
    split_out: bool,
) -> Any:
    """Calls `op(*split, *whole, axis_name=...)`, split over the vocabulary.

    Args:
      spec: gives the mesh.
      op: a row-wise op of `pallas_kernels`.
      split: arrays [R, V].
      whole: arrays [R].
      split_out: True when the result is [R, V], False when every part is [R].
    """
    mesh = spec.mesh
    rows, vocab = split[0].shape
    size = mesh.shape.get("tensor", 1) if mesh is not None else 1
    if mesh is None or size == 1 or vocab % size:
        return op(*split, *whole, axis_name=None)
    data = mesh.shape.get("data", 1)
    row_axis = "data" if data > 1 and rows % data == 0 else None
    by_vocab, by_row = PartitionSpec(row_axis, "tensor"), PartitionSpec(row_axis)
    mapped = jax.shard_map(
        functools.partial(op, axis_name="tensor"),
        mesh=mesh,
        in_specs=(*[by_vocab for _ in split], *[by_row for _ in whole]),
        out_specs=by_vocab if split_out else by_row,
        check_vma=False,
    )
    return mapped(*split, *whole)


def law(
    spec: Spec, variant: Variant, logits: jax.Array, requests: Requests, row: jax.Array
) -> jax.Array:
    """The distribution that a row's token is drawn from.

    The one place where temperature and filters are applied: drafter, verifier
    and plain sampler all come here.

    Args:
      spec: gives the mesh.
      variant: "sampled" or "filtered".
      logits: float32[R, V].
      requests: settings of B requests.
      row: int32[R]. Request of each row.

    Returns:
      int32[R, V], integer rows.
    """

    def pick(x: jax.Array) -> jax.Array:
        return jnp.take(x, row, axis=0, mode="clip")

    scale = pick(requests.scale)
    if variant == "sampled":
        return over_vocabulary(spec, integer_rows, [logits], [scale], True)
    return over_vocabulary(
        spec,
        filtered_rows,
        [logits],
        [scale, pick(requests.top_p), pick(requests.top_k), pick(requests.min_p)],
        True,
    )


def choose(
    spec: Spec,
    variant: Variant,
    logits: jax.Array,
    requests: Requests,
    words: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """One token a request, and how it was drawn.

    Args:
      spec: gives the mesh.
      variant: what the program can do.
      logits: float32[B, V].
      requests: settings.
      words: uint32[B]; unused when greedy.

    Returns:
      (int32[B], the integer row int32[B, V], the offset in it int32[B]); the row
      and the offset are None when greedy.
    """
    if variant == "greedy" or words is None:
        ids = over_vocabulary(spec, argmax_ids, [logits], [], False)
        return ids, None, None
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)
    weights = law(spec, variant, logits, requests, row)
    ids, offset = over_vocabulary(spec, draw, [weights], [points(words)], False)
    return ids, weights, offset


def verify(
    spec: Spec,
    variant: Variant,
    logits: jax.Array,
    requests: Requests,
    row: jax.Array,
    draft_ids: jax.Array,
    draft_rows: jax.Array | None,
    offsets: jax.Array | None,
    is_verify: jax.Array,
    words: jax.Array,
) -> VerifiedRows:
    """Verdicts on flat rows; see `pallas_kernels.verify`.

    Args:
      spec: gives the mesh.
      variant: what the program can do.
      logits: float32[G, V]. Target logits.
      requests: settings of B requests.
      row: int32[G]. Request of each row.
      draft_ids: int32[G]. The draft that each row judges.
      draft_rows: int32[G, V]. The row it was drawn from, on the target's ids; None
        when greedy, and when nothing was drafted.
      offsets: int32[G]. Where its point lies in its interval; None with the rows.
      is_verify: bool[G]. False for fresh rows.
      words: uint32[G]. Of the fresh rows.
    """
    if variant == "greedy":
        return over_vocabulary(
            spec,
            verify_greedy,
            [logits],
            [draft_ids, is_verify],
            False,
        )
    weights = law(spec, variant, logits, requests, row)
    if draft_rows is None or offsets is None:
        token, _ = over_vocabulary(spec, draw, [weights], [points(words)], False)
        one = jnp.ones_like(token)
        return VerifiedRows(one.astype(bool), token, one.astype(jnp.float32))
    return over_vocabulary(
        spec,
        verify_rows,
        [weights, draft_rows],
        [draft_ids, offsets, is_verify, points(words)],
        False,
    )


def log_probabilities(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Log-probability of `ids` under the unscaled, unfiltered target row.

    Args:
      logits: float32[R, V].
      ids: int32[R]; -1 gives -inf.

    Returns:
      float32[R].
    """
    # A masked sum instead of an index keeps a split vocabulary in place.
    hit = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] == ids[:, None]
    chosen = jnp.max(jnp.where(hit, logits, -jnp.inf), axis=1)
    return chosen - jax.nn.logsumexp(logits, axis=1)
