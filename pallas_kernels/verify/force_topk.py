"""Verification on the K largest logits of a row, an option that changes the target.

The target's law is cut to its K largest logits and the draft's to its own K, which
are other tokens: only what both selected can be compared. The draft's mass outside of
the target's selection falls in any case. Relative to the cut target the rule is exact,
as on whole rows; the cut target is another model.

    target's selection   a  b  c  d            p, sums to S
    draft's, aligned     a     c               q on the target's places
    draft's, outside        x     y            falls, whatever the point

Fallen points are numbered along the target's places, then along the outside tokens in
the draft's order; they are as many as the units of max(p - q, 0).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.integer_rows import TOTAL
from pallas_kernels.locate import locate
from pallas_kernels.verify.rows import VerifiedRows, share
from pallas_kernels.vocab_axis import row_sum, take, token_ids


class Aligned(NamedTuple):
    """Draft rows on the places of the target's selection.

    rows: int32[R, K]. Weights of the tokens that both selected, else 0.
    place: int32[R]. Place of the draft; -1 where the target did not select it.
    before: int32[R]. Weight of the outside tokens in front of such a draft.
    width: int32[R]. The draft's own weight, wherever it lies.
    """

    rows: jax.Array
    place: jax.Array
    before: jax.Array
    width: jax.Array


def select_topk(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest logits of each row, in falling order, lowest id first on ties.

    Args:
      logits: float32[R, V].
      count: static. K, 1 .. V.

    Returns:
      (float32[R, K], int32[R, K]): logits and their ids.

    Raises:
      ValueError: `count` out of range.
    """
    if not 1 <= count <= logits.shape[1]:
        raise ValueError(f"`count` is {count}; allowed: 1 .. {logits.shape[1]}")
    return jax.lax.top_k(logits, count)


def align(
    draft_rows: jax.Array,
    draft_selected: jax.Array,
    draft_ids: jax.Array,
    target_selected: jax.Array,
) -> Aligned:
    """Draft rows on the target's places.

    Args:
      draft_rows: int32[R, K']. The integer rows that the drafts were drawn from.
      draft_selected: int32[R, K']. Their ids, without repetition.
      draft_ids: int32[R]. The drafts; -1 for none.
      target_selected: int32[R, K]. The target's ids, without repetition.

    Returns:
      Aligned.
    """

    def one(
        weights: jax.Array, ids: jax.Array, draft: jax.Array, wanted: jax.Array
    ) -> Aligned:
        def find(among: jax.Array, these: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Where ids lie in a selection, and whether they do."""
            order = jnp.argsort(among)
            spot = jnp.searchsorted(among[order], these)
            spot = order[jnp.minimum(spot, among.shape[0] - 1)].astype(jnp.int32)
            return spot, among[spot] == these

        spot, both = find(ids, wanted)
        own, drawn = find(ids, draft[None])
        place, selected = find(wanted, draft[None])
        _, inside = find(wanted, ids)
        front = jnp.arange(ids.shape[0], dtype=jnp.int32) < own
        return Aligned(
            rows=jnp.where(both, weights[spot], 0),
            place=jnp.where(selected, place, -1)[0],
            before=jnp.where(front & ~inside, weights, 0).sum(),
            width=jnp.where(drawn, weights[own], 0)[0],
        )

    return jax.vmap(one)(draft_rows, draft_selected, draft_ids, target_selected)


def verify_rows(
    p: jax.Array,
    aligned: Aligned,
    target_selected: jax.Array,
    draft_ids: jax.Array,
    offsets: jax.Array,
    is_verify: jax.Array,
    points: jax.Array,
    *,
    total: int = TOTAL,
) -> VerifiedRows:
    """`pallas_kernels.verify_rows` on selections.

    Args:
      p: int32[R, K]. Rows of the target's selection that sum to `total`.
      aligned: of `align`.
      target_selected: int32[R, K]. Ids of the places.
      draft_ids: int32[R]. Drafts, -1 for none.
      offsets: int32[R]. Where each draft's point lies in its interval.
      is_verify: bool[R]. False marks a fresh row.
      points: int32[R]. Points of [0, total) for the fresh rows.
      total: static, what rows sum to.

    Returns:
      VerifiedRows; tokens are ids.
    """
    q, place = aligned.rows, aligned.place
    p_x = take(p, place)
    drawn = is_verify & (offsets >= 0) & (offsets < aligned.width)
    accept = drawn & (offsets < p_x)
    over = jnp.maximum(q - p, 0)
    front = token_ids(p.shape[1]) < place[:, None]
    among = row_sum(jnp.where(front, over, 0)) + offsets - p_x
    behind = row_sum(over) + aligned.before + offsets
    rank = jnp.where(place >= 0, among, behind)
    source = jnp.where(drawn[:, None], jnp.maximum(p - q, 0), p)
    own = jnp.where(is_verify, offsets, points)
    found = locate(source, jnp.where(drawn, jnp.maximum(rank, 0), own))
    token = jnp.where(found >= 0, take(target_selected, found), -1)
    kept = share(row_sum(jnp.minimum(p, q)), is_verify, total)
    return VerifiedRows(accept | ~is_verify, jnp.where(accept, draft_ids, token), kept)
