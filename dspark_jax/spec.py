"""The static half of a model: what is compiled, as opposed to its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from dspark_jax.config_draft import DraftConfig, TargetConfig
from dspark_jax.models import family
from dspark_jax.models.params import (
    Tree,
    check_tree,
    flatten,
    partition,
    shardings,
)
from pallas_kernels import (
    Implementation,
    implementation_here,
    require_implementation,
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """Everything that shapes a program; hashable, a static argument of jit.

    Attributes:
      target: the target's config.
      draft: the draft's config, or None for plain decoding only.
      mesh: device mesh with axes among "data" and "tensor", or None.
      cache_dtype: dtype of keys and values.
      implementation: of sampling and verification, "reference" or "pallas" (GPU
        kernels); None takes the kernels where they can run. All give the same bits.
      one_by_one: verify row by row and end at the first draft that falls, instead of
        all rows at once, see `decoding.one_by_one`. Not for policies.

    Raises:
      ValueError: kernels asked for by name that cannot run here.
    """

    target: TargetConfig
    draft: DraftConfig | None = None
    mesh: Mesh | None = None
    cache_dtype: str = "float32"
    implementation: Implementation | None = None
    one_by_one: bool = False

    def __post_init__(self) -> None:
        require_implementation(self.implementation)
        if self.implementation == "pallas" and self.mesh is not None:
            raise ValueError(
                "implementation='pallas' with a mesh: the kernels hold whole rows on "
                "one device; use 'reference' or None"
            )
        if self.mesh is not None:
            family.target_of(self.target).check_mesh(self.target, self.mesh)

    @property
    def row_ops(self) -> Implementation | None:
        """What sampling and verification are asked for; None leaves it to them."""
        return self.implementation if self.mesh is None else "reference"

    @property
    def implementation_here(self) -> Implementation:
        """What sampling and verification run as on the default device."""
        return implementation_here(self.row_ops)

    @property
    def gamma(self) -> int:
        """Longest draft; 0 without a draft model."""
        return self.draft.gamma if self.draft else 0

    @property
    def width(self) -> int:
        """Rows a request is padded to in attention, in every program.

        One width for plain and speculative programs, so that both compute a
        position in the same way. At least 2: single rows are slow on CPU.
        """
        return max(2, self.gamma + 1)

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs the draft reads."""
        return self.draft.target_layer_ids if self.draft else ()

    def bucket(self, batch: int, draft_length: int) -> int:
        """G, the flat rows of a round."""
        return max(2, batch * (draft_length + 1))

    def check_params(self, params: Tree) -> None:
        """Raises ValueError unless `params` holds what the spec declares."""
        if "target" not in params or (self.draft is not None) != ("draft" in params):
            want = ["target"] + (["draft"] if self.draft else [])
            raise ValueError(f"`params` has keys {sorted(params)}; expected {want}")
        target = family.target_of(self.target)
        check_tree(params["target"], target.abstract_params(self.target), "target")
        if self.draft:
            draft = family.draft_of(self.draft)
            declared = draft.abstract_draft_params(self.draft)
            given = dict(params["draft"])
            if not self.draft.own_head and self.draft.draft_vocab_size is not None:
                # `load` gathers the target's head rows once.
                if "lm_head" not in given:
                    raise ValueError(
                        "a draft with a reduced vocabulary shares the target's head: "
                        "put its rows at params['draft']['lm_head']['weight'] with "
                        "`share_tables`"
                    )
                del given["lm_head"]
            check_tree(given, declared, "draft")

    def check_draft_length(self, draft_length: int | None) -> int:
        """The draft length to use; ValueError when it is out of range.

        None is the draft's usual one, see `DraftConfig`.
        """
        if draft_length is None:
            usual = self.draft.usual_length if self.draft else None
            return self.gamma if usual is None else usual
        ok = isinstance(draft_length, int) and not isinstance(draft_length, bool)
        if not ok or not 0 <= draft_length <= self.gamma:
            limit = (
                f"0..{self.gamma}, the block size of the draft"
                if self.draft
                else "0, as the model was loaded without a draft"
            )
            raise ValueError(f"`draft_length` is {draft_length!r}; allowed: {limit}")
        return draft_length

    def shard(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrains an array inside a trace to the mesh, by logical axes."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(x.shape, *axes))

    def sharding(self, shape: tuple[int, ...], *axes: str | None) -> NamedSharding:
        """Where an array with these logical axes lies; needs a mesh."""
        if self.mesh is None:
            raise ValueError("`mesh` is None; shardings need a mesh")
        counts = family.target_of(self.target).unit_counts(self.target)
        return NamedSharding(self.mesh, partition(axes, shape, self.mesh, counts))


def share_tables(draft: DraftConfig, draft_params: Tree, target_params: Tree) -> Tree:
    """Adds the target's head rows to a draft with a reduced vocabulary.

    Drafts whose head is not their own use the target's. With a reduced
    vocabulary the rows `d2t` are gathered once, here, instead of every round.
    """
    if draft.own_head or draft.draft_vocab_size is None:
        return draft_params
    table = family.target_of(draft.backbone).head_table(target_params)
    shape = (draft.head_rows, table.shape[1])

    def take(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.take(table, ids, axis=0, mode="clip")

    place = None if isinstance(table, Tracer) else getattr(table, "sharding", None)
    if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
        # Left to itself, the result would lie whole on every device.
        take = jax.jit(take, out_shardings=_head_place(shape, place.mesh))
    return {**draft_params, "lm_head": {"weight": take(table, draft_params["d2t"])}}


def _head_place(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, partition(("vocab", "embed"), shape, mesh, {}))


def param_shardings(spec: Spec) -> Tree:
    """`NamedSharding`s for `{"target": ..., "draft": ...}`; needs a mesh.

    Layers are stacked; a draft that shares rows of the target's head has a place
    for them too, see `share_tables`.
    """
    if spec.mesh is None:
        raise ValueError("`mesh` is None; shardings need a mesh")
    target = family.target_of(spec.target)
    shapes, axes = target.declaration(spec.target)
    counts = target.unit_counts(spec.target)
    tree: dict[str, Any] = {"target": shardings(shapes, axes, spec.mesh, counts)}
    if spec.draft is not None:
        shapes, axes = family.draft_of(spec.draft).declaration(spec.draft)
        layers = spec.draft.backbone
        counts = family.target_of(layers).unit_counts(layers)
        tree["draft"] = shardings(shapes, axes, spec.mesh, counts)
        if spec.draft.draft_vocab_size is not None and not spec.draft.own_head:
            rows = (spec.draft.head_rows, spec.draft.backbone.hidden_size)
            tree["draft"]["lm_head"] = {"weight": _head_place(rows, spec.mesh)}
    return tree


def placement(spec: Spec, part: str) -> Callable[[tuple[str, ...]], NamedSharding]:
    """Where a leaf of "target" or "draft" goes, by its path; needs a mesh."""
    table = flatten(param_shardings(spec)[part])
    return lambda path: table[path]
