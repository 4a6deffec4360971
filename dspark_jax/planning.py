"""Bytes of a model on each device, from its settings alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from dspark_jax.checkpoint.hf_config import parse_config, read_json
from dspark_jax.checkpoint.hf_decoder import text_config
from dspark_jax.checkpoint.v4_config import is_v4, v4_config, v4_draft_config
from dspark_jax.config import require
from dspark_jax.config_draft import DraftConfig, TargetConfig
from dspark_jax.errors import CheckpointError
from dspark_jax.models import family
from dspark_jax.models.params import Tree, flatten, partition


@dataclasses.dataclass(frozen=True)
class Plan:
    """What lies on each device.

    Attributes:
      parameters: bytes of parameters by part ("target", "draft").
      states: bytes of one request's state by part.
      requests: decoded together.
      context: positions of each.
      devices: over which heads, groups, experts and vocabulary are split.
      memory: bytes of a device.
    """

    parameters: Mapping[str, int]
    states: Mapping[str, int]
    requests: int
    context: int
    devices: int
    memory: int

    @property
    def total(self) -> int:
        """Bytes a device, without activations."""
        return sum(self.parameters.values()) + self.requests * sum(self.states.values())

    @property
    def fits(self) -> bool:
        """Whether a tenth of the memory is left for activations."""
        return self.total <= 0.9 * self.memory


def read_settings(
    path: str | Path, expand: str | None = None
) -> tuple[TargetConfig, DraftConfig | None]:
    """Settings of a target, and of a draft in the same files, from a `config.json`.

    Args:
      path: the file, or its folder; no weights are needed.
      expand: dtype of weights that are published as short floats; None keeps those.

    Raises:
      CheckpointError: no target that is supported.
    """
    path = Path(path)
    data = read_json(path / "config.json" if path.is_dir() else path)
    if is_v4(data):
        short = bool(data.get("quantization_config")) and expand is None
        target = dataclasses.replace(
            v4_config(data),
            dtype=expand or "bfloat16",
            weights="fp8_fp4" if short else "float",
        )
        return target, v4_draft_config(data, target)
    kind, config = parse_config(data)
    if kind != "target" or isinstance(config, DraftConfig):
        raise CheckpointError(f"{path} is a {kind}; a target's settings are needed")
    named = text_config(data).get("dtype") or text_config(data).get("torch_dtype")
    return dataclasses.replace(config, dtype=expand or named or config.dtype), None


def make_plan(
    target: TargetConfig,
    draft: DraftConfig | None,
    *,
    devices: int,
    memory: int,
    requests: int = 1,
    context: int = 65536,
    cache_dtype: str = "bfloat16",
) -> Plan:
    """Counts parameters and states as they are declared and split.

    Args:
      target: the target.
      draft: its draft, or None.
      devices: on the "tensor" axis.
      memory: bytes of a device.
      requests: decoded together.
      context: positions of each.
      cache_dtype: of keys, values and entries.

    Raises:
      ValueError: numbers below 1.
    """
    for name, value in (
        ("devices", devices),
        ("memory", memory),
        ("requests", requests),
        ("context", context),
    ):
        require(value >= 1, name, value, ">= 1")
    of = family.target_of(target)
    size = 1, context, jnp.dtype(cache_dtype), True
    counts = of.unit_counts(target)
    parameters = {"target": _share(*of.declaration(target), counts, devices)}
    empty = jax.eval_shape(lambda: of.empty_state(target, *size))
    states = {"target": _share(empty, _axes(of, empty), counts, devices)}
    if draft is not None:
        drafts = family.draft_of(draft)
        counts = family.target_of(draft.backbone).unit_counts(draft.backbone)
        parameters["draft"] = _share(*drafts.declaration(draft), counts, devices)
        rings = jax.eval_shape(lambda: drafts.empty_context(draft, *size))
        states["draft"] = _share(rings, _axes(drafts, rings), counts, devices)
    return Plan(parameters, states, requests, context, devices, memory)


def _axes(of: family.Store, state: Tree) -> Tree:
    """Logical axes of a state's leaves."""
    return jax.tree.map(of.state_axes, state)


def _share(shapes: Tree, axes: Tree, counts: Mapping[str, int], devices: int) -> int:
    """Bytes of one device's part."""
    mesh: Any = AbstractMesh((devices,), ("tensor",))
    named, total = flatten(axes), 0
    for path, leaf in flatten(shapes).items():
        spec = partition(named[path], leaf.shape, mesh, counts)
        cut = math.prod(devices for axis in spec if axis == "tensor")
        total += math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize // cut
    return total
