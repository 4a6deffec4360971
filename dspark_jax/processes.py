"""Several processes, each with some devices of one mesh.

Every process runs the same Python: the same calls, in the same order, with the same
arguments. A program of the mesh starts when all of them have called it, so what the
host decides must come out alike everywhere. It may follow from arguments and from what
rounds emitted, but not from a clock, nor from numbers that one process drew by itself.
"""

from __future__ import annotations

import functools
import secrets
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


def spans(mesh: Mesh | AbstractMesh | None) -> bool:
    """Whether a mesh has devices of several processes."""
    return isinstance(mesh, Mesh) and mesh.is_multi_process


def put(tree: Any, places: Any) -> Any:
    """Arrays where `places` says, a `NamedSharding` for each of them.

    `jax.device_put` would ask all processes whether they mean the same numbers, array
    by array. Here every process takes its own for what its devices hold.

    Args:
      tree: numpy arrays or arrays of one device, alike in all processes, or arrays
        that lie where they belong.
      places: the same structure.
    """

    def one(x: Any, place: NamedSharding) -> jax.Array:
        if not spans(place.mesh):
            return jax.device_put(x, place)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            # Returns it as it is if it lies there.
            return jax.device_put(x, place)
        value = np.asarray(x)
        return jax.make_array_from_callback(value.shape, place, lambda i: value[i])

    return jax.tree.map(one, tree, places)


def fresh_words(mesh: Mesh | None, count: int) -> np.ndarray:
    """uint32[count, 2]. Seeds that nobody has chosen, alike in all processes."""
    words = np.frombuffer(secrets.token_bytes(8 * count), np.uint32)
    words = words.reshape(count, 2)
    return words if mesh is None or not spans(mesh) else _of_first(mesh, words)


def _of_first(mesh: Mesh, value: np.ndarray) -> np.ndarray:
    """What the process of the mesh's first device has."""
    by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.size, *value.shape)
    own = jax.make_array_from_callback(shape, by_device, lambda _: value[None])
    return np.asarray(_first(mesh)(own))


@functools.cache
def _first(mesh: Mesh) -> Any:
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda x: x[0], out_shardings=whole)
