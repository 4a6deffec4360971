"""Publication, checked at the boundary."""

import jax

from pallas_kernels.publish import reference
from pallas_kernels.publish.reference import Published

__all__ = ["Published", "publish"]


def publish(
    accept: jax.Array,
    token: jax.Array,
    draft_ids: jax.Array,
    n_drafts: jax.Array,
    stop_ids: jax.Array,
    remaining: jax.Array,
    active: jax.Array,
) -> Published:
    """Turns verdicts on rows into what each request emits.

    Row `j < n_drafts` judges draft `j`, row `n_drafts` is the fresh row, later rows
    are padding. A request emits its accepted prefix and then the token of the final
    row, the first that was not accepted or else the fresh row; the line is cut just
    behind the first stop id and at the request's budget. A stop id behind the cut, or
    in a draft that fell, stops nothing.

    Args:
      accept: bool[B, T]. Verdicts, as `verify_rows` gives them.
      token: int32[B, T]. Tokens, as `verify_rows` gives them.
      draft_ids: int32[B, T - 1]. The drafts that were judged.
      n_drafts: int32[B]. Drafts checked in this round, 0 to T - 1.
      stop_ids: int32[B, S]. Ids that end a request, -1 for padding.
      remaining: int32[B]. Tokens the request may still emit.
      active: bool[B]. False emits nothing.

    Returns:
      Published.

    Raises:
      ValueError: shapes that do not belong together.
    """
    if token.ndim != 2 or token.shape[1] < 1:
        raise ValueError(f"`token` has shape {token.shape}; it must be [B, T], T >= 1")
    batch, width = token.shape
    expected = {
        "accept": (accept, (batch, width)),
        "draft_ids": (draft_ids, (batch, width - 1)),
        "n_drafts": (n_drafts, (batch,)),
        "stop_ids": (stop_ids, (batch, *stop_ids.shape[1:2])),
        "remaining": (remaining, (batch,)),
        "active": (active, (batch,)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(
                f"`{name}` has shape {array.shape}; for `token` {token.shape} it must "
                f"be {shape}"
            )
    if stop_ids.ndim != 2:
        raise ValueError(
            f"`stop_ids` has shape {stop_ids.shape}; it must be [B, S], -1 as padding"
        )
    return reference.publish(
        accept, token, draft_ids, n_drafts, stop_ids, remaining, active
    )
