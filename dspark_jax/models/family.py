"""Families of models: what decoding asks of a target and of a draft.

A family is a module with these functions. Decoding knows no other names, so a target
whose state is not a cache of keys and values needs no case of its own there.

    logits, features, pending = target.evaluate(config, params, state, C, rows, taps)
    state = target.commit(config, state, pending, start, count)
    context = draft.inject(config, params, context, features, rows, count)
    base, plain = draft.block_rows(config, params, ..., context, C, anchor, position)

States and contexts are pytrees of arrays over requests. `evaluate` never writes one;
`commit` and `inject` make the first `count` rows of each request's block readable.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.config_draft import DraftConfig, TargetConfig
from dspark_jax.config_v4 import V4Config
from dspark_jax.models import deepseek_v4, dense
from dspark_jax.models.draft import backbone, stages
from dspark_jax.models.params import Axes, Tree
from dspark_jax.models.rows import Rows

# A pytree of arrays; which one is the family's own business.
State = Any


class Store(Protocol):
    """What can be done with the state of either model without knowing it."""

    def state_axes(self, leaf: Any, /) -> Axes:
        """Logical axes of a leaf; one of them is "batch"."""
        ...

    def grown(self, config: Any, state: State, capacity: int, more: int, /) -> State:
        """The state with room for `more` positions instead of `capacity`."""
        ...

    def for_cpu(
        self, config: Any, params: Tree, whole_numbers: bool = False, /
    ) -> Tree:
        """Parameters as decoding on a CPU wants them."""
        ...


class Target(Store, Protocol):
    """A target's functions; see `dense` for what they take and give."""

    def declaration(self, config: Any, /) -> tuple[Tree, Tree]:
        """(shapes, axes) of all parameters."""
        ...

    def abstract_params(self, config: Any, /) -> Tree:
        """Shapes of all parameters."""
        ...

    def unit_counts(self, config: Any, /) -> dict[str, int]:
        """Units of logical axes that sharding must not cut inside one."""
        ...

    def head_table(self, params: Tree, /) -> jax.Array:
        """The output head's weight."""
        ...

    def check_mesh(self, config: Any, mesh: Mesh, /) -> None:
        """ValueError where the model cannot be split over a mesh."""
        ...

    def chunk_fits(self, start: int, width: int, capacity: int, /) -> bool:
        """Whether a block of `width` rows may begin at `start`."""
        ...

    def empty_state(
        self, config: Any, batch: int, capacity: int, dtype: jnp.dtype,
        stacked: bool = False, /,
    ) -> State:  # fmt: skip
        """Nothing committed."""
        ...

    def state_bytes(
        self, config: Any, batch: int, capacity: int, dtype: jnp.dtype, /
    ) -> int:
        """Bytes of a state."""
        ...

    def evaluate(
        self,
        config: Any,
        params: Tree,
        state: State,
        capacity: int,
        rows: Rows,
        /,
        taps: tuple[int, ...] = (),
        logit_rows: jax.Array | None = None,
        mesh: Mesh | None = None,
    ) -> tuple[jax.Array, jax.Array, State]:
        """Logits, features and what the rows add to the state."""
        ...

    def commit(
        self, config: Any, state: State, pending: State, start: jax.Array,
        count: jax.Array, /,
    ) -> State:  # fmt: skip
        """The state with the first `count` rows of each block in it."""
        ...

    def cut(
        self, config: Any, state: State, place: jax.Array, start: jax.Array,
        size: int, /,
    ) -> State:  # fmt: skip
        """What one request keeps of some positions."""
        ...

    def put(self, config: Any, state: State, part: State, place: jax.Array, /) -> State:
        """The state with what `cut` gave, from position 0 on, in a request's place."""
        ...


class Draft(Store, Protocol):
    """A draft's functions; see `draft.backbone` for what they take and give."""

    def declaration(self, config: DraftConfig, /) -> tuple[Tree, Tree]:
        """(shapes, axes) of all parameters."""
        ...

    def abstract_draft_params(self, config: DraftConfig, /) -> Tree:
        """Shapes of all parameters."""
        ...

    def ends(self, config: DraftConfig, params: Tree, /) -> Any:
        """The modules `markov` and `confidence`, with their parameters."""
        ...

    def empty_context(
        self, config: DraftConfig, batch: int, capacity: int, dtype: jnp.dtype,
        stacked: bool = False, /,
    ) -> State:  # fmt: skip
        """Nothing committed."""
        ...

    def context_bytes(
        self, config: DraftConfig, batch: int, capacity: int, dtype: jnp.dtype, /
    ) -> int:
        """Bytes of a context."""
        ...

    def inject(
        self, config: DraftConfig, params: Tree, context: State, features: jax.Array,
        rows: Rows, count: jax.Array, /,
    ) -> State:  # fmt: skip
        """The context with the first `count` rows of each block in it."""
        ...

    def block_rows(
        self, config: DraftConfig, params: Tree, target_params: Tree, context: State,
        capacity: int, anchor: jax.Array, position: jax.Array,
        mesh: Mesh | None = None, /,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """Rows of a block for the output head, and for the confidence head."""
        ...

    def base_logits(
        self, config: DraftConfig, params: Tree, target_params: Tree,
        hidden: jax.Array, /,
    ) -> jax.Array:  # fmt: skip
        """Logits of rows before the Markov bias."""
        ...


def target_of(config: TargetConfig) -> Target:
    """The family of a target."""
    return deepseek_v4 if isinstance(config, V4Config) else dense


def draft_of(config: DraftConfig) -> Draft:
    """The family of a draft."""
    return stages if isinstance(config.backbone, V4Config) else backbone
