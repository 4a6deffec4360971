"""Which programs of a model give the same bits on this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dspark_jax.decoding.equivalence import (
    INPUTS,
    REFERENCE_BATCH,
    REFERENCE_CAPACITY,
    Equivalence,
    Shape,
)
from dspark_jax.decoding.equivalence_file import load_digests, save_digests
from dspark_jax.decoding.plans import policy_length, row_buckets
from dspark_jax.decoding.shapes import Shapes, choose_shapes
from dspark_jax.evaluation.machine import hardware, versions
from dspark_jax.model import Model
from dspark_jax.models.params import flatten
from dspark_jax.scheduling.policy import Policy
from dspark_jax.settings import Buckets


def probe(
    model: Model,
    *,
    batches: Sequence[int] = (1,),
    draft_length: int | None = None,
    needs: Sequence[int] = (512,),
    batch: int = REFERENCE_BATCH,
    capacity: int = REFERENCE_CAPACITY,
    inputs: int = INPUTS,
    cache: str | Path | None = None,
) -> Equivalence:
    """Probes the programs that deterministic calls may use, ahead of them.

    Calls with `deterministic=True` probe what they need when it is new; this does it
    at start, keeps what was found in a file, and may choose another reference. Texts
    are comparable between processes with the same reference. One evaluation of the
    target is compiled for each shape.

    Args:
      model: the model; what is found belongs to it from now on.
      batches: requests that calls will have.
      draft_length: drafts a round; None is the draft's usual number.
      needs: cache positions that calls will need.
      batch: of the reference, to which everything can be padded.
      capacity: of the reference.
      inputs: random inputs for each shape.
      cache: file that keeps what was found; that of another model or machine, and of
        other versions, is not used.

    Returns:
      What is known, see `Equivalence.groups`.

    Raises:
      ValueError: numbers out of range.

    Example:
      >>> import dspark_jax as dspark
      >>> model = dspark.testing.tiny_model("gemma4")
      >>> known = dspark.probe(
      ...     model, needs=[128], draft_length=0, batch=1, capacity=128, inputs=1
      ... )
      >>> known.inputs, len(known.groups) >= 2
      (1, True)
    """
    n = model.spec.check_draft_length(draft_length)
    known = Equivalence(
        model.spec, model.params, batch=batch, capacity=capacity, inputs=inputs
    )
    key = _key(model, known)
    if cache is not None:
        known.digests.update(load_digests(cache, key))
    for count in batches:
        size = Buckets.fit(count, Buckets().batch) or Buckets().batch[-1]
        for need in needs:
            room = min(
                Buckets.fit(need, Buckets().capacity) or need,
                model.spec.target.max_position,
            )
            for chunk in Buckets().prefill:
                known.holds(Shape("prefill", size, chunk, room))
            for rows in row_buckets(size, n):
                known.holds(Shape("round", size, rows, room))
    if cache is not None:
        save_digests(cache, key, known.digests)
    model.programs.equivalence = known
    return known


def equivalence_of(model: Model) -> Equivalence:
    """What is known of a model so far; nothing is probed."""
    programs = model.programs
    if programs.equivalence is None:
        programs.equivalence = Equivalence(model.spec, model.params)
    return programs.equivalence


def deterministic_shapes(
    model: Model,
    *,
    batch: int,
    capacity: int,
    draft_length: int | None = None,
    policy: Policy | None = None,
) -> Shapes:
    """Sizes for `generate_tokens`, as `generate(deterministic=True)` takes them.

    For greedy decoding and shared noise. New shapes are probed.

    Args:
      model: the model.
      batch: requests; the sizes may ask for more, or fewer.
      capacity: positions a request needs.
      draft_length: drafts a round; None is the draft's usual number.
      policy: as for `generate_tokens`.

    Raises:
      ValueError: a capacity that cannot be padded; what `generate_tokens` refuses.

    Example:
      >>> import dspark_jax as dspark
      >>> model = dspark.testing.tiny_model("gemma4")
      >>> shapes = deterministic_shapes(model, batch=4, capacity=512, draft_length=4)
      >>> shapes.batch, shapes.rows
      (4, (20,))
    """
    n, scheduled = policy_length(model.spec, policy, draft_length)
    return choose_shapes(
        model.spec,
        equivalence_of(model),
        count=batch,
        draft_length=n,
        capacity=capacity,
        scheduled=scheduled is not None,
    )


def _key(model: Model, known: Equivalence) -> dict[str, object]:
    """What digests belong to, as JSON gives it back."""
    spec, machine = model.spec, hardware()
    # Enough to tell weights apart: a few numbers of every leaf.
    weights = hashlib.sha256()
    for _, leaf in sorted(flatten(model.params["target"]).items()):
        weights.update(np.asarray(leaf.ravel()[:64]).tobytes())
    return {
        "device": machine["device"],
        "devices": machine["devices"],
        "cores": machine["cores"],
        "target": repr(spec.target),
        "taps": list(spec.taps),
        "width": spec.width,
        "cache_dtype": spec.cache_dtype,
        "weights": weights.hexdigest(),
        "batch": known.batch,
        "capacity": known.capacity,
        "inputs": known.inputs,
        **versions(),
    }
