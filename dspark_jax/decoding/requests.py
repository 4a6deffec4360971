"""Settings of a batch of requests as arrays, so that each may have its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.words import seed_words
from dspark_jax.settings import SamplingParams
from pallas_kernels import scale_of

# What a compiled program can do: argmax only; softmax; softmax and filters; the last
# two with noise that draft and target share.
Variant = Literal["greedy", "sampled", "filtered", "noisy", "noisy_filtered"]
# A request names at most this many stop ids.
MAX_STOP_IDS = 8


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale", "top_p", "top_k", "min_p", "seeds", "stop_ids"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Requests:
    """Per-request settings.

    Attributes:
      scale: float32[B]. 1 / temperature in the units of integer rows, see
        `pallas_kernels.scale_of`; 0 is greedy.
      top_p: float32[B]. 1 is off.
      top_k: int32[B]. 0 is off.
      min_p: float32[B]. 0 is off.
      seeds: uint32[B, 2].
      stop_ids: int32[B, S]. -1 pads.
    """

    scale: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    min_p: jax.Array
    seeds: jax.Array
    stop_ids: jax.Array


def variant_of(sampling: Sequence[SamplingParams], noisy: bool = False) -> Variant:
    """The simplest program that serves all of `sampling`.

    Args:
      sampling: one entry a request.
      noisy: whether draft and target share noise; greedy requests need none.
    """
    if any(s.filtered for s in sampling):
        return "noisy_filtered" if noisy else "filtered"
    if all(s.greedy for s in sampling):
        return "greedy"
    return "noisy" if noisy else "sampled"


def check_verification(verification: str) -> bool:
    """Whether draft and target share noise; ValueError for an unknown name."""
    if verification not in ("exact", "shared_noise"):
        raise ValueError(
            f"`verification` is {verification!r}; allowed: 'exact', 'shared_noise'"
        )
    return verification == "shared_noise"


def is_noisy(variant: Variant) -> bool:
    """Whether a program's words are keys of shared noise."""
    return variant.startswith("noisy")


def holds_rows(variant: Variant) -> bool:
    """Whether proposals of a program keep the rows they were drawn from."""
    return variant in ("sampled", "filtered")


def pack_requests(
    sampling: Sequence[SamplingParams],
    seeds: np.ndarray,
    default_stop_ids: tuple[int, ...],
) -> Requests:
    """Arrays for `sampling`, on the device.

    Args:
      sampling: one entry a request.
      seeds: uint32[B, 2]. Words for requests without a seed of their own.
      default_stop_ids: for requests whose `stop_ids` is None.

    Raises:
      ValueError: more than 8 stop ids in one request.
    """
    # Made on the host first: converting on a device compiles a program.
    return jax.tree.map(jnp.asarray, listed_requests(sampling, seeds, default_stop_ids))


def listed_requests(
    sampling: Sequence[SamplingParams],
    seeds: np.ndarray,
    default_stop_ids: tuple[int, ...],
) -> Requests:
    """`pack_requests`, but numpy arrays, of which `select` takes some."""
    stops = np.full((len(sampling), MAX_STOP_IDS), -1, np.int32)
    seeds = np.array(seeds, np.uint32)
    for row, one in enumerate(sampling):
        ids = default_stop_ids if one.stop_ids is None else one.stop_ids
        if len(ids) > MAX_STOP_IDS:
            raise ValueError(
                f"`stop_ids` has {len(ids)} ids; allowed: at most {MAX_STOP_IDS}"
            )
        stops[row, : len(ids)] = ids
        if one.seed is not None:
            seeds[row] = seed_words(one.seed)
    top_k = [max(one.top_k or 0, 0) for one in sampling]
    fields = dict(
        scale=scale_of(np.asarray([s.temperature for s in sampling])),
        top_p=np.asarray([s.top_p for s in sampling], np.float32),
        top_k=np.asarray(top_k, np.int32),
        min_p=np.asarray([s.min_p for s in sampling], np.float32),
        seeds=seeds,
        stop_ids=stops,
    )
    return Requests(**fields)  # type: ignore[arg-type]


def select(requests: Requests, rows: Sequence[int], size: int) -> Requests:
    """Settings of some requests, repeating the first one up to `size`."""
    chosen = np.asarray([*rows, *[rows[0]] * (size - len(rows))], np.int64)
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[chosen]), requests)


def replaced(requests: Requests, rows: Sequence[int], new: Requests) -> Requests:
    """Settings with those of `rows` replaced by the first ones of `new`."""

    def put(x: jax.Array, y: jax.Array) -> jax.Array:
        out = np.array(x)
        out[np.asarray(rows)] = np.asarray(y)[: len(rows)]
        return jnp.asarray(out)

    return jax.tree.map(put, requests, new)
