"""Verification of flat rows, checked at the boundary.

Rows are independent: which of them are reached is decided by `publish`.
"""

import jax

from pallas_kernels.verify import textbook
from pallas_kernels.verify.rows import VerifiedRows

__all__ = ["VerifiedRows", "verify_greedy", "verify_rows"]


def verify_rows(
    p: jax.Array,
    q: jax.Array,
    draft_ids: jax.Array,
    is_verify: jax.Array,
    accept_words: jax.Array,
    token_words: jax.Array,
    *,
    axis_name: str | None = None,
) -> VerifiedRows:
    """Judges drafts so that what is emitted is distributed as `p`.

    Leviathan et al. 2023, section 2.3: a draft stands if `u < min(1, p(x) / q(x))`;
    the replacement is drawn from `max(p - q, 0)`, from `p` where that is zero
    everywhere. A draft of probability zero under `q`, and the id -1, always fall.

    Args:
      p: float32[R, V]. Target rows, filtered as for plain sampling.
      q: float32[R, V]. The rows the drafts were really drawn from: a one-hot where
        a draft was not drawn but chosen. Ignored on fresh rows.
      draft_ids: int32[R]. Drafts, -1 for none. Ignored on fresh rows.
      is_verify: bool[R]. False marks a fresh row, which draws from `p`.
      accept_words: uint32[R]. Random words for the verdicts, used nowhere else.
      token_words: uint32[R]. Random words for the tokens, used nowhere else.
      axis_name: mesh axis over which `V` is split, or None.

    Returns:
      VerifiedRows.

    Raises:
      ValueError: shapes that do not belong together.
    """
    _require_rows(p.shape, q=q)
    _require_vectors(
        p.shape,
        draft_ids=draft_ids,
        is_verify=is_verify,
        accept_words=accept_words,
        token_words=token_words,
    )
    return textbook.verify_rows(
        p, q, draft_ids, is_verify, accept_words, token_words, axis_name
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
    return textbook.verify_greedy(logits, draft_ids, is_verify, axis_name)


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
