"""Verification of flat rows, checked at the boundary.

Rows are independent: which of them are reached is decided by `publish`.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.integer_rows import TOTAL
from pallas_kernels.verify import reference
from pallas_kernels.verify.rows import VerifiedRows

__all__ = ["VerifiedRows", "verify_greedy", "verify_rows"]


def verify_rows(
    p: jax.Array,
    q: jax.Array,
    draft_ids: jax.Array,
    offsets: jax.Array,
    is_verify: jax.Array,
    points: jax.Array,
    *,
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
      total: static, what rows sum to.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      VerifiedRows.

    Raises:
      ValueError: shapes or dtypes that do not belong together.
    """
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
    return reference.verify_rows(
        p, q, draft_ids, offsets, is_verify, points, total=total, axis_name=axis_name
    )


def verify_greedy(
    logits: jax.Array,
    draft_ids: jax.Array,
    is_verify: jax.Array,
    *,
    axis_name: str | None = None,
) -> VerifiedRows:
    """`verify_rows` at temperature 0: a draft stands if it is the argmax.

    Equal to `verify_rows` with one-hot `p` and `q`, without building either.

    Args:
      logits: float32[R, V]. Target logits; lowest id on ties.
      draft_ids: int32[R]. Drafts, -1 for none.
      is_verify: bool[R]. False marks a fresh row.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      VerifiedRows; `accept_prob` is 1 where the draft stands, else 0.

    Raises:
      ValueError: shapes that do not belong together.
    """
    _require_vectors(logits.shape, draft_ids=draft_ids, is_verify=is_verify)
    return reference.verify_greedy(logits, draft_ids, is_verify, axis_name)


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
                f"`{name}` has shape {array.shape}; for target rows {shape} it must "
                f"be {shape[:1]}, one entry per row"
            )
