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

from dspark_jax.decoding.requests import Requests, Variant, is_noisy
from dspark_jax.spec import Spec
from pallas_kernels import (
    Sampled,
    VerifiedRows,
    argmax_ids,
    filtered_logits,
    noisy_argmax,
    points,
    sample_logits,
    verify_greedy,
    verify_logits,
    verify_shared_noise,
)


def over_vocabulary(
    spec: Spec,
    op: Callable[..., Any],
    split: Sequence[jax.Array],
    whole: Sequence[jax.Array],
    out: Any,
) -> Any:
    """Calls `op(*split, *whole, axis_name=...)`, split over the vocabulary.

    Args:
      spec: gives the mesh.
      op: a row-wise op of `pallas_kernels`.
      split: arrays [R, V].
      whole: arrays [R] or [R, 2].
      out: bools in the form of the result, or one for all of it: True where it is
        [R, V], False where it is [R].
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
        out_specs=jax.tree.map(lambda wide: by_vocab if wide else by_row, out),
        check_vma=False,
    )
    return mapped(*split, *whole)


def filtered(
    spec: Spec, variant: Variant, logits: jax.Array, requests: Requests, row: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logits after the filters, and the scale that makes them a law.

    The one place where temperature and filters are applied: drafter, verifier
    and plain sampler all come here.

    Args:
      spec: gives the mesh.
      variant: what the program can do, not "greedy".
      logits: float32[R, V].
      requests: settings of B requests.
      row: int32[R]. Request of each row.

    Returns:
      (float32[R, V], float32[R]).
    """

    def pick(x: jax.Array) -> jax.Array:
        return jnp.take(x, row, axis=0, mode="clip")

    scale = pick(requests.scale)
    if variant in ("sampled", "noisy"):
        return logits, scale
    cut = [scale, pick(requests.top_p), pick(requests.top_k), pick(requests.min_p)]
    return over_vocabulary(spec, filtered_logits, [logits], cut, True), scale


def choose(
    spec: Spec,
    variant: Variant,
    logits: jax.Array,
    requests: Requests,
    words: jax.Array | None,
    ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """One token a request, and how it was drawn.

    Args:
      spec: gives the mesh.
      variant: what the program can do.
      logits: float32[B, V].
      requests: settings.
      words: uint32[B], or uint32[B, 2] of shared noise; unused when greedy.
      ids: int32[V]. Token of each column, where columns are not ids.

    Returns:
      (columns int32[B], the integer row int32[B, V], the offset in it int32[B]); row
      and offset are None when greedy and with shared noise.
    """
    if variant == "greedy" or words is None:
        op = functools.partial(argmax_ids, implementation=spec.row_ops)
        return over_vocabulary(spec, op, [logits], [], False), None, None
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)
    if is_noisy(variant):
        logits, scale = filtered(spec, variant, logits, requests, row)
        if ids is None:
            whole = [scale, words]
            return (
                over_vocabulary(spec, noisy_argmax, [logits], whole, False),
                None,
                None,
            )

        def pick(logits, ids, scale, keys, axis_name):
            return noisy_argmax(logits, scale, keys, ids, axis_name=axis_name)

        split = [logits, jnp.broadcast_to(ids, logits.shape)]
        return over_vocabulary(spec, pick, split, [scale, words], False), None, None
    drawn = _sample(spec, variant, logits, requests, row, words)
    return drawn.ids, drawn.rows, drawn.offsets


def verify(
    spec: Spec,
    variant: Variant,
    logits: jax.Array,
    requests: Requests,
    row: jax.Array,
    draft_ids: jax.Array,
    drawn: tuple[jax.Array, jax.Array, jax.Array] | None,
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
      drawn: how the drafts were drawn: the rows int32[N, V] on the target's ids,
        which of them is each draft's, int32[G], and where its point lies in its
        interval, int32[G]. None when greedy, with shared noise, and when nothing was
        drafted.
      is_verify: bool[G]. False for fresh rows.
      words: uint32[G] of the fresh rows, or uint32[G, 2] of shared noise.
    """
    if variant == "greedy":
        op = functools.partial(verify_greedy, implementation=spec.row_ops)
        return over_vocabulary(spec, op, [logits], [draft_ids, is_verify], False)
    if is_noisy(variant):
        logits, scale = filtered(spec, variant, logits, requests, row)
        whole = [scale, draft_ids, is_verify, words]
        return over_vocabulary(spec, verify_shared_noise, [logits], whole, False)
    if drawn is None:
        token = _sample(spec, variant, logits, requests, row, words).ids
        one = jnp.ones_like(token)
        return VerifiedRows(one.astype(bool), token, one.astype(jnp.float32))
    draft_rows, source, offsets = drawn
    logits, scale = filtered(spec, variant, logits, requests, row)
    if spec.mesh is not None:
        # Rows lie with the rows that judge them.
        draft_rows = jnp.take(draft_rows, source, axis=0, mode="clip")

    def judge(logits, draft_rows, scale, source, *rest, axis_name):
        if spec.mesh is not None:
            source = jnp.arange(len(scale), dtype=jnp.int32)
        return verify_logits(
            logits, scale, draft_rows, source, *rest,
            implementation=spec.row_ops, axis_name=axis_name,
        )  # fmt: skip

    whole = [scale, source, draft_ids, offsets, is_verify, points(words)]
    return over_vocabulary(spec, judge, [logits, draft_rows], whole, False)


def _sample(
    spec: Spec,
    variant: Variant,
    logits: jax.Array,
    requests: Requests,
    row: jax.Array,
    words: jax.Array,
) -> Sampled:
    logits, scale = filtered(spec, variant, logits, requests, row)
    op = functools.partial(sample_logits, implementation=spec.row_ops)
    wide = Sampled._make(field == "rows" for field in Sampled._fields)
    return over_vocabulary(spec, op, [logits], [scale, points(words)], wide)


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


def doubt(logits: jax.Array) -> jax.Array:
    """Distance of the two highest logits of each row, float32[R]; 0 on a tie."""
    top = jnp.max(logits, axis=1, keepdims=True)
    at = jnp.argmax(logits, axis=1)[:, None]
    column = jnp.arange(logits.shape[1], dtype=at.dtype)[None]
    second = jnp.max(jnp.where(column == at, -jnp.inf, logits), axis=1)
    return top[:, 0] - second
