"""Where the host loop's arrays lie on a mesh, one place for each of them.

A compiled program takes its arguments only as they lay when it was compiled, so
what goes in and what comes out is pinned: requests over "data", vocabulary and
key/value heads over "tensor", whatever divides.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from dspark_jax.decoding.publishing import RoundOut
from dspark_jax.decoding.state import DecodeState
from dspark_jax.models import family
from dspark_jax.processes import spans
from dspark_jax.spec import Spec


def places(spec: Spec, value: Any) -> Any:
    """A `NamedSharding` for every array of a state, requests, logits or a result."""
    if isinstance(value, DecodeState):
        rest = dataclasses.replace(value, target={}, draft=None)
        context = value.draft
        if spec.draft is not None:
            context = _stores(spec, family.draft_of(spec.draft), context)
        return dataclasses.replace(
            jax.tree.map(lambda x: _by_request(spec, x), rest),
            target=_stores(spec, family.target_of(spec.target), value.target),
            draft=context,
        )
    if isinstance(value, RoundOut) and spans(spec.mesh):
        # Every host reads all of it.
        return jax.tree.map(lambda x: spec.sharding(x.shape, *[None] * x.ndim), value)
    if type(value) is tuple:
        return tuple(places(spec, one) for one in value)
    return jax.tree.map(lambda x: _by_request(spec, x), value)


def _by_request(spec: Spec, x: Any) -> jax.sharding.NamedSharding:
    """[B, ...]; a last axis as long as a vocabulary is one. Scalars lie whole."""
    axes: list[str | None] = ["batch", *[None] * (x.ndim - 1)][: x.ndim]
    widths = [spec.target.vocab_size] + ([spec.draft.head_rows] if spec.draft else [])
    of_logits = x.ndim > 1 and x.dtype == "float32"
    of_weights = x.ndim > 2 and x.dtype == "int32"
    if x.shape and x.shape[-1] in widths and (of_logits or of_weights):
        axes[-1] = "vocab"
    return spec.sharding(x.shape, *axes)


def _stores(spec: Spec, of: family.Store, store: Any) -> Any:
    """Where the leaves of a model's state lie."""
    return jax.tree.map(lambda x: spec.sharding(x.shape, *of.state_axes(x)), store)
