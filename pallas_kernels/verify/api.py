"""Verification of flat rows, checked at the boundary.

Rows are independent: which of them are reached is decided by `publish`.
"""

from __future__ import annotations

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import Implementation, run
from pallas_kernels.integer_rows import TOTAL
from pallas_kernels.noise import noisy_argmax
from pallas_kernels.sample.api import argmax_ids
from pallas_kernels.verify import penalised, reference
from pallas_kernels.verify.rows import VerifiedRows

__all__ = [
    "VerifiedRows",
    "verify_greedy",
    "verify_logits",
    "verify_rows",
    "verify_shared_noise",
]

Mode = Literal["exact", "penalised"]


def verify_rows(
    p: jax.Array,
    q: jax.Array,
    draft_ids: jax.Array,
    offsets: jax.Array,
    is_verify: jax.Array,
    points: jax.Array,
    *,
    mode: Mode = "exact",
    words: jax.Array | None = None,
    total: int = TOTAL,
    axis_name: str | None = None,
) -> VerifiedRows:
    """Judges drafts so that what is emitted is distributed as `p`, exactly.

    Args:
      p: int32[R, V]. Target rows that sum to `total`.
      q: int32[R, V]. The rows the drafts were really drawn from, of the same total;
        a one-hot where a draft was not drawn but chosen. Ignored on fresh rows.
      draft_ids: int32[R]. Drafts, -1 for none. Ignored on fresh rows.
      offsets: int32[R]. Where each draft's point lies in its interval of `q`; for a
        chosen draft any uniform point of [0, total). A draft whose offset is not
        inside its interval was not drawn from `q`: it falls, and the offset is the
        point of a token of its own.
      is_verify: bool[R]. False marks a fresh row.
      points: int32[R]. Points of [0, total) for the fresh rows.
      mode: "exact", or "penalised": the reference engine's residual, with which what
        is emitted deviates from `p` by at most 5.0e-5, relatively above and
        absolutely below; see `verify.penalised`.
      words: uint32[R, 2]. Random words of the replacements; penalised only.
      total: static, what rows sum to.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      VerifiedRows.

    Raises:
      ValueError: shapes or dtypes that do not belong together, or words that do not
        belong to the mode.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"`mode` is {mode!r}; allowed: {', '.join(get_args(Mode))}")
    if (words is not None) != (mode == "penalised"):
        given = "given" if words is not None else "missing"
        raise ValueError(
            f"`words` are {given} with mode={mode!r}; only 'penalised' takes them"
        )
    _require_rows(p.shape, q=q)
    for name, x in (("p", p), ("q", q)):
        if x.dtype != jnp.int32:
            raise ValueError(f"`{name}` is {x.dtype}; integer rows are int32")
    _require_vectors(
        p.shape,
        draft_ids=draft_ids,
        offsets=offsets,
        is_verify=is_verify,
        points=points,
    )
    args = (p, q, draft_ids, offsets, is_verify, points)
    if words is None:
        return reference.verify_rows(*args, total=total, axis_name=axis_name)
    _require_pairs(p.shape, words=words)
    return penalised.verify_rows(*args, words, total=total, axis_name=axis_name)


def verify_logits(
    logits: jax.Array,
    scale: jax.Array,
    draft_rows: jax.Array,
    source: jax.Array,
    draft_ids: jax.Array,
    offsets: jax.Array,
    is_verify: jax.Array,
    points: jax.Array,
    *,
    total: int = TOTAL,
    implementation: Implementation | None = None,
    axis_name: str | None = None,
) -> VerifiedRows:
    """`verify_rows` on `integer_rows(logits, scale)`, without keeping those.

    Args:
      logits: float32 or bfloat16[R, V]. Target logits; -inf excludes a token.
      scale: float32[R], from `scale_of`.
      draft_rows: int32[N, V]. All rows that drafts were drawn from.
      source: int32[R]. Which of them each row's draft was drawn from. Ignored on
        fresh rows.
      draft_ids: as for `verify_rows`.
      offsets: as for `verify_rows`.
      is_verify: as for `verify_rows`.
      points: as for `verify_rows`.
      total: as for `verify_rows`.
      implementation: None, "reference" or "pallas"; all give the same bits.
      axis_name: as for `verify_rows`.

    Returns:
      VerifiedRows.

    Raises:
      ValueError: shapes or dtypes that do not belong together, or an implementation
        that cannot run here.
    """
    _require_drawn(logits.shape, draft_rows)
    _require_vectors(
        logits.shape,
        scale=scale,
        source=source,
        draft_ids=draft_ids,
        offsets=offsets,
        is_verify=is_verify,
        points=points,
    )

    def kernel(*args: jax.Array) -> VerifiedRows:
        return _kernels().verify_logits(*args, total=total)

    return run(
        implementation,
        functools.partial(reference.verify_logits, total=total),
        kernel,
        logits,
        scale,
        draft_rows,
        source,
        draft_ids,
        offsets,
        is_verify,
        points,
        axis_name=axis_name,
    )


def verify_greedy(
    logits: jax.Array,
    draft_ids: jax.Array,
    is_verify: jax.Array,
    *,
    implementation: Implementation | None = None,
    axis_name: str | None = None,
) -> VerifiedRows:
    """`verify_rows` at temperature 0: a draft stands if it is the argmax.

    Equal to `verify_rows` with one-hot `p` and `q`, without building either.

    Args:
      logits: float32[R, V]. Target logits; lowest id on ties.
      draft_ids: int32[R]. Drafts, -1 for none.
      is_verify: bool[R]. False marks a fresh row.
      implementation: as for `verify_logits`.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      VerifiedRows; `accept_prob` is 1 where the draft stands, else 0.

    Raises:
      ValueError: shapes that do not belong together.
    """
    _require_vectors(logits.shape, draft_ids=draft_ids, is_verify=is_verify)
    best = argmax_ids(logits, implementation=implementation, axis_name=axis_name)
    return reference.judge_greedy(best, draft_ids, is_verify)


def verify_shared_noise(
    logits: jax.Array,
    scale: jax.Array,
    draft_ids: jax.Array,
    is_verify: jax.Array,
    keys: jax.Array,
    *,
    axis_name: str | None = None,
) -> VerifiedRows:
    """Judges drafts by what the target picks with the noise that the draft had.

    A draft stands if it is the target's own token, and that token is emitted in any
    case: it depends on the logits and the key alone, so that no draft, length or
    schedule changes the text. Drafts must have been picked by `noisy_argmax` with the
    key of their position, or few will stand.

    Args:
      logits: float32 or bfloat16[R, V]. Target logits; -inf excludes a token.
      scale: float32[R], from `scale_of`.
      draft_ids: int32[R]. Drafts, -1 for none.
      is_verify: bool[R]. False marks a fresh row.
      keys: uint32[R, 2]. One key for every position of a request.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      VerifiedRows; `accept_prob` is 1 where the draft stands, else 0. Over the keys a
      draft stands with probability sum_x 1 / sum_y max(p_y / p_x, q_y / q_x).

    Raises:
      ValueError: shapes that do not belong together.
    """
    _require_vectors(
        logits.shape, scale=scale, draft_ids=draft_ids, is_verify=is_verify
    )
    _require_pairs(logits.shape, keys=keys)
    best = noisy_argmax(logits, scale, keys, axis_name=axis_name)
    return reference.judge_greedy(best, draft_ids, is_verify)


def _kernels():
    # Older JAX than the kernels need must be able to import this module.
    from pallas_kernels.verify import pallas_mosaic_gpu

    return pallas_mosaic_gpu


def _require_drawn(shape: tuple[int, ...], draft_rows: jax.Array) -> None:
    if len(shape) != 2 or draft_rows.ndim != 2 or draft_rows.shape[1] != shape[1]:
        raise ValueError(
            f"`draft_rows` has shape {draft_rows.shape} and the logits {shape}; they "
            "must be [N, V] and [R, V]: scatter a reduced draft vocabulary to V first"
        )
    if draft_rows.dtype != jnp.int32:
        raise ValueError(f"`draft_rows` is {draft_rows.dtype}; integer rows are int32")


def _require_rows(shape: tuple[int, ...], **arrays: jax.Array) -> None:
    for name, array in arrays.items():
        if len(shape) != 2 or array.shape != shape:
            raise ValueError(
                f"`{name}` has shape {array.shape} and the target rows {shape}; both "
                "must be [R, V]: scatter a reduced draft vocabulary to V first"
            )


def _require_vectors(shape: tuple[int, ...], **arrays: jax.Array) -> None:
    for name, array in arrays.items():
        if array.shape != shape[:1]:
            raise ValueError(
                f"`{name}` has shape {array.shape}; for rows {shape} it must "
                f"be {shape[:1]}, one entry per row"
            )


def _require_pairs(shape: tuple[int, ...], **arrays: jax.Array) -> None:
    for name, array in arrays.items():
        if array.shape != (shape[0], 2) or array.dtype != jnp.uint32:
            raise ValueError(
                f"`{name}` is {array.dtype}{list(array.shape)}; for rows {shape} it "
                f"must be uint32[{shape[0]}, 2]"
            )
