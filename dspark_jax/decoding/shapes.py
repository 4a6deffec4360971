"""The sizes that deterministic decoding keeps to.

A call is padded up, in requests, rows and prefill chunks, until all of its programs
are in the reference's group (see `equivalence`); more requests than that allows are
decoded some at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark_jax.decoding.equivalence import REFERENCE_CHUNK, Equivalence, Shape
from dspark_jax.decoding.plans import row_buckets
from dspark_jax.models.attention import tile_size
from dspark_jax.settings import Buckets
from dspark_jax.spec import Spec


@dataclass(frozen=True)
class Shapes:
    """Static sizes of the programs that a call may use.

    Attributes:
      batch: B; a smaller one is padded up.
      capacity: C.
      prefill: chunk lengths, increasing.
      rows: G of its rounds, increasing; the last one holds all drafts.
    """

    batch: int
    capacity: int
    prefill: tuple[int, ...]
    rows: tuple[int, ...]


def choose_shapes(
    spec: Spec,
    known: Equivalence,
    *,
    count: int,
    draft_length: int,
    capacity: int,
    scheduled: bool = False,
    one_size: bool = False,
    fixed_batch: bool = False,
    fixed_capacity: bool = False,
) -> Shapes:
    """The smallest sizes that a call can be padded to, all of the reference's group.

    Shapes that were not met before are probed.

    Args:
      spec: the model.
      known: its programs' equivalence.
      count: requests.
      draft_length: n.
      capacity: C that the call needs.
      scheduled: lengths are decided round by round: all row counts of the group are
        wanted, not only one that holds whole blocks.
      one_size: the draft's bits count too, and those are not probed: only the
        reference's batch and chunk are used, and one row count.
      fixed_batch: B is `count`, as a state was made for it.
      fixed_capacity: C is `capacity`, as it was asked for.

    Returns:
      Shapes; with a batch below `count` the requests take turns.

    Raises:
      ValueError: sizes that cannot be padded and compute other bits.
    """
    buckets = Buckets().batch
    first = Buckets.fit(count, buckets) or buckets[-1]
    batches = [b for b in buckets if first <= b <= known.batch] or [first, known.batch]
    if fixed_batch:
        batches = [count]
    capacities = [capacity]
    if not fixed_capacity and known.capacity > capacity:
        capacities.append(known.capacity)
    if one_size and (not fixed_batch or count == known.batch):
        rows = (spec.bucket(known.batch, draft_length),)
        return Shapes(known.batch, capacities[-1], (REFERENCE_CHUNK,), rows)
    if one_size:
        batches = []
    for size in capacities:
        for batch in batches:
            found = _at(spec, known, batch, draft_length, size, scheduled)
            if found is not None:
                return found
    raise ValueError(
        f"`deterministic` with batch {count} and `capacity` {capacity}: these "
        f"programs compute other bits than the reference's (batch {known.batch}, "
        f"capacity {known.capacity}); decode in capacity {known.capacity}, or move the "
        "reference with `probe(model, capacity=...)`"
    )


def _at(
    spec: Spec,
    known: Equivalence,
    batch: int,
    n: int,
    capacity: int,
    scheduled: bool,
) -> Shapes | None:
    """Sizes at one batch and capacity; None where the group has none."""
    prefill = [
        size
        for size in Buckets().prefill
        if known.holds(Shape("prefill", batch, size, capacity))
    ]
    # A chunk of up to a tile fits wherever a prompt stands.
    if not prefill or prefill[0] > tile_size(capacity):
        return None
    rows = _rows(spec, known, batch, n, capacity, scheduled)
    return Shapes(batch, capacity, tuple(prefill), rows) if rows else None


def _rows(
    spec: Spec,
    known: Equivalence,
    batch: int,
    n: int,
    capacity: int,
    scheduled: bool,
) -> tuple[int, ...]:
    whole = spec.bucket(batch, n)
    found: list[int] = []
    for rows in row_buckets(batch, spec.gamma):
        wanted = rows >= whole or scheduled
        if wanted and known.holds(Shape("round", batch, rows, capacity)):
            found.append(rows)
            if rows >= whole:
                return tuple(found)
    return ()
