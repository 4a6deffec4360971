"""Which evaluation programs give a request the same bits.

A program is compiled for a batch, a number of rows and a capacity, and each may sum in
an order of its own. One of them is the reference. Programs that gave the reference's
bits on every probed input form its group; deterministic decoding uses no others. That
is evidence, not proof: inputs are random and finitely many. The reference itself needs
none, and everything can be padded to it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dspark_jax.config import require
from dspark_jax.decoding.probing import Probe
from dspark_jax.models.params import Tree
from dspark_jax.settings import Buckets
from dspark_jax.spec import Spec

logger = logging.getLogger(__name__)

Kind = Literal["round", "prefill"]
REFERENCE_BATCH, REFERENCE_CAPACITY, REFERENCE_CHUNK = 4, 1024, 64
INPUTS = 16


@dataclass(frozen=True, order=True)
class Shape:
    """What an evaluation is compiled for.

    Attributes:
      kind: "round" or "prefill"; they are not compared with each other, as a position
        is always evaluated by the same one of them.
      batch: B.
      rows: G of a round, flat rows; P of a prefill, tokens of each request.
      capacity: C, positions of the cache.
    """

    kind: Kind
    batch: int
    rows: int
    capacity: int


# A digest by input; None where the input does not fit the capacity.
Digests = tuple[str | None, ...]


class Equivalence:
    """What is known about the programs of a model on this device.

    Shapes are probed when they are first asked for.

    Attributes:
      batch: of the reference.
      capacity: of the reference.
      inputs: random inputs that every shape is probed with.
      digests: of each shape that was probed.
    """

    def __init__(
        self,
        spec: Spec,
        params: Tree,
        *,
        batch: int = REFERENCE_BATCH,
        capacity: int = REFERENCE_CAPACITY,
        inputs: int = INPUTS,
        digests: Mapping[Shape, Digests] | None = None,
    ):
        """Compiles nothing.

        Args:
          spec: the model.
          params: `{"target": ..., "draft": ...}`.
          batch: requests of the reference, a batch bucket.
          capacity: of the reference; at most the model's positions are taken.
          inputs: see the class.
          digests: known already, of the same model, device and inputs.

        Raises:
          ValueError: numbers out of range.
        """
        sizes = Buckets().batch
        require(batch in sizes, "batch", batch, f"one of {sizes}")
        ok = isinstance(inputs, int) and inputs >= 1
        require(ok, "inputs", inputs, "an int >= 1")
        self.batch, self.inputs = batch, inputs
        self.capacity = min(capacity, spec.target.max_position)
        self._spec = spec
        self._probe = Probe(spec, params, inputs, (batch, self.capacity))
        self.digests = dict(digests or {})

    def reference(self, kind: Kind) -> Shape:
        """The program that the others are compared with."""
        rows = REFERENCE_CHUNK
        if kind == "round":
            rows = self._spec.bucket(self.batch, self._spec.gamma)
        return Shape(kind, self.batch, rows, self.capacity)

    def holds(self, shape: Shape) -> bool:
        """Whether a shape is in the reference's group.

        Sharded models are not probed: there the reference is alone.
        """
        reference = self.reference(shape.kind)
        if shape == reference:
            return True
        if self._spec.mesh is not None:
            return False
        pairs = zip(self._digests(shape), self._digests(reference), strict=True)
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        # A cache that no input fits says nothing.
        return bool(both) and all(a == b for a, b in both)

    @property
    def groups(self) -> tuple[tuple[Shape, ...], ...]:
        """Probed shapes whose bits agreed on all inputs, the reference's first.

        Shapes of small capacities saw fewer inputs; they are listed by those.
        """
        by_digests: dict[tuple[str, Digests], list[Shape]] = {}
        for shape in sorted(self.digests):
            key = (shape.kind, self.digests[shape])
            if self.holds(shape):
                key = (shape.kind, ())
            by_digests.setdefault(key, []).append(shape)
        order = sorted(by_digests, key=lambda key: (key[0] == "prefill", key[1] != ()))
        return tuple(tuple(by_digests[key]) for key in order)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready: the inputs, and groups by kind."""
        groups = [
            {
                "kind": group[0].kind,
                "used": self.holds(group[0]),
                "shapes": [[s.batch, s.rows, s.capacity] for s in group],
            }
            for group in self.groups
        ]
        return {"inputs": self.inputs, "groups": groups}

    def _digests(self, shape: Shape) -> Digests:
        known = self.digests.get(shape)
        if known is None:
            known = self._probe.digests(
                shape.kind == "round", shape.batch, shape.rows, shape.capacity
            )
            self.digests[shape] = known
            if shape != self.reference(shape.kind):
                logger.info(
                    "%s: %s bits as the reference on %d inputs",
                    shape,
                    "the same" if self.holds(shape) else "OTHER",
                    sum(one is not None for one in known),
                )
        return known
