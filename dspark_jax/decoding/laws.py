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
from pallas_kernels import filters
from pallas_kernels.draw import draw
from pallas_kernels.verify import VerifiedRows, verify_greedy, verify_rows
from pallas_kernels.words import uniform


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
      float32[R, V].
    """

    def pick(x: jax.Array) -> jax.Array:
        return jnp.take(x, row, axis=0, mode="clip")

    temperature = pick(requests.temperature)
    if variant == "sampled":
        return over_vocabulary(
            spec, filters.probabilities, [logits], [temperature], True
        )
    return over_vocabulary(
        spec,
        filters.filtered_probabilities,
        [logits],
        [temperature, pick(requests.top_p), pick(requests.top_k), pick(requests.min_p)],
        True,
    )


def choose(
    spec: Spec,
    variant: Variant,
    logits: jax.Array,
    requests: Requests,
    words: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """One token a request, and the law it was drawn from.

    Args:
      spec: gives the mesh.
      variant: what the program can do.
      logits: float32[B, V].
      requests: settings.
      words: uint32[B]; unused when greedy.

    Returns:
      (int32[B], float32[B, V] or None when greedy).
    """
    if variant == "greedy" or words is None:
        ids = over_vocabulary(spec, filters.argmax_ids, [logits], [], False)
        return ids, None
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)
    probs = law(spec, variant, logits, requests, row)
    return over_vocabulary(spec, draw, [probs], [uniform(words)], False), probs


def verify(
    spec: Spec,
    variant: Variant,
    logits: jax.Array,
    requests: Requests,
    row: jax.Array,
    draft_ids: jax.Array,
    draft_probs: jax.Array | None,
    is_verify: jax.Array,
    accept_words: jax.Array,
    token_words: jax.Array,
) -> VerifiedRows:
    """Verdicts on flat rows; see `pallas_kernels.verify`.

    Args:
      spec: gives the mesh.
      variant: what the program can do.
      logits: float32[G, V]. Target logits.
      requests: settings of B requests.
      row: int32[G]. Request of each row.
      draft_ids: int32[G]. The draft that each row judges.
      draft_probs: float32[G, V]. Its law on the target's ids; None when greedy
        or when nothing was drafted.
      is_verify: bool[G]. False for fresh rows.
      accept_words: uint32[G].
      token_words: uint32[G].
    """
    if variant == "greedy":
        return over_vocabulary(
            spec,
            verify_greedy,
            [logits],
            [draft_ids, is_verify],
            False,
        )
    if draft_probs is None:
        draft_probs = jnp.zeros_like(logits)
    probs = law(spec, variant, logits, requests, row)
    return over_vocabulary(
        spec,
        verify_rows,
        [probs, draft_probs],
        [draft_ids, is_verify, accept_words, token_words],
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
