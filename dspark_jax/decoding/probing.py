"""Random inputs through the target's evaluation, and digests of what comes out.

An input is a context, which the reference's prefill puts into a cache, and a few tokens
behind it. A program evaluates those tokens beside other inputs, in random places; a
round's in calls of random lengths. A digest covers the keys and values of these tokens
in all layers, and the logits behind the last one.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.models import family
from dspark_jax.models.params import Tree, is_stacked
from dspark_jax.models.rows import dense_rows, packed_rows
from dspark_jax.spec import Spec

# Tokens that a context is fed in, in every cache.
CHUNK = 16
# Longest context; it reaches over the edge of the first tile of positions.
LONGEST = 110

# (params, cache, ids int32[B, T], counts int32[B], start int32[B])
# -> (logits float32[R, V], cache)
Program = Callable[..., tuple[jax.Array, family.State]]


class Probe:
    """Evaluates the same inputs in programs of any shape.

    Attributes:
      steps: tokens of an input behind its context.
    """

    def __init__(
        self, spec: Spec, params: Tree, inputs: int, reference: tuple[int, int]
    ):
        """Draws the inputs.

        Args:
          spec: the model.
          params: its parameters.
          inputs: how many.
          reference: batch and capacity of the program that feeds contexts.
        """
        self._spec, self._target = spec, params["target"]
        self._reference = reference
        self._stacked = is_stacked(self._target)
        self.steps = spec.width
        rng = np.random.default_rng(0)
        most = max(min(LONGEST, reference[1] - self.steps), 1)
        # Half of them short, so that small caches hold some as well.
        short = max(most // 4, 1)
        spans = [(1, short), (short, most)]
        lengths = [
            int(rng.integers(*spans[i % 2], endpoint=True)) for i in range(inputs)
        ]
        vocab = spec.target.valid_vocab or spec.target.vocab_size
        self._ids = [
            rng.integers(0, vocab, length + self.steps).astype(np.int32)
            for length in lengths
        ]

    def digests(
        self, is_round: bool, batch: int, rows: int, capacity: int
    ) -> tuple[str | None, ...]:
        """A digest of each input; None where its blocks exceed the capacity.

        Args:
          is_round: rows are packed, as in rounds; else right-padded, as in prefill.
          batch: B.
          rows: G of a round; P, tokens a request, of a prefill.
          capacity: C.
        """
        width = self._spec.width if is_round else rows
        fits = family.target_of(self._spec.target).chunk_fits
        fit = [
            i
            for i, ids in enumerate(self._ids)
            if len(ids) <= capacity and fits(len(ids) - 1, width, capacity)
        ]
        found: list[str | None] = [None] * len(self._ids)
        make = self._round if is_round else self._prefill
        program = make(batch, rows, capacity)
        rng = np.random.default_rng(1)
        for first in range(0, len(fit), batch):
            group = fit[first : first + batch]
            places = rng.permutation(batch)[: len(group)]
            run = functools.partial(self._run, program, is_round, batch, rows, capacity)
            for index, digest in zip(group, run(group, places, rng), strict=True):
                found[index] = digest
        return tuple(found)

    def _run(
        self,
        program: Program,
        is_round: bool,
        batch: int,
        rows: int,
        capacity: int,
        group: Sequence[int],
        places: np.ndarray,
        rng: np.random.Generator,
    ) -> list[str]:
        """Digests of at most `batch` inputs, evaluated together."""
        cache = self._zeros(batch, capacity)
        for index, place in zip(group, places, strict=True):
            context = jax.tree.map(jnp.asarray, self._contexts[index])
            cache = _put(self._spec, cache, context, np.int32(place))
        begin = np.zeros((batch,), np.int32)
        for index, place in zip(group, places, strict=True):
            begin[place] = len(self._ids[index]) - self.steps
        done, last = np.zeros((batch,), np.int32), {}
        width = self._spec.width if is_round else rows
        while True:
            left = np.zeros((batch,), np.int32)
            left[places] = self.steps - done[places]
            if not left.any():
                break
            counts = _counts(rng, left, rows) if is_round else left
            ids = np.zeros((batch, width), np.int32)
            for index, place in zip(group, places, strict=True):
                at, count = begin[place] + done[place], counts[place]
                ids[place, :count] = self._ids[index][at : at + count]
            logits, cache = program(self._target, cache, ids, counts, begin + done)
            done += counts
            ends = np.cumsum(counts) - 1 if is_round else np.arange(batch)
            for index, place in zip(group, places, strict=True):
                if counts[place] and done[place] == self.steps:
                    last[index] = np.asarray(logits[ends[place]])
        found = []
        for index, place in zip(group, places, strict=True):
            kept = _cut(self._spec, cache, np.int32(place), begin[place], self.steps)
            digest = hashlib.sha256(last[index].tobytes())
            for leaf in jax.tree.leaves(kept):
                digest.update(np.asarray(leaf).tobytes())
            found.append(digest.hexdigest())
        return found

    @functools.cached_property
    def _contexts(self) -> list[family.State]:
        """Keys and values of each context, on the host, [.., 1, K, LONGEST, d]."""
        batch, capacity = self._reference
        program = self._prefill(batch, CHUNK, capacity)
        found: list[family.State] = []
        for first in range(0, len(self._ids), batch):
            group = self._ids[first : first + batch]
            cache = self._zeros(batch, capacity)
            longest = max(map(len, group)) - self.steps
            for at in range(0, longest, CHUNK):
                ids = np.zeros((batch, CHUNK), np.int32)
                counts = np.zeros((batch,), np.int32)
                for row, one in enumerate(group):
                    part = one[: len(one) - self.steps][at : at + CHUNK]
                    ids[row, : len(part)], counts[row] = part, len(part)
                start = np.full((batch,), at, np.int32)
                _, cache = program(self._target, cache, ids, counts, start)
            for row in range(len(group)):
                size = min(LONGEST, capacity)
                part = _cut(self._spec, cache, np.int32(row), np.int32(0), size)
                found.append(jax.device_get(part))
        return found

    def _zeros(self, batch: int, capacity: int) -> family.State:
        dtype = jnp.dtype(self._spec.cache_dtype)
        target = family.target_of(self._spec.target)
        return target.empty_state(
            self._spec.target, batch, capacity, dtype, self._stacked
        )

    def _round(self, batch: int, rows: int, capacity: int) -> Program:
        width = self._spec.width

        def probed_round(params, cache, ids, counts, start):
            packed = packed_rows(ids, counts, start, width, rows)
            return self._evaluate(params, cache, capacity, packed, counts, None)

        return jax.jit(probed_round, donate_argnums=1)

    def _prefill(self, batch: int, rows: int, capacity: int) -> Program:
        def probed_prefill(params, cache, ids, counts, start):
            first = jnp.arange(batch, dtype=jnp.int32) * rows
            last = first + jnp.maximum(counts - 1, 0)
            padded = dense_rows(ids, counts, start)
            return self._evaluate(params, cache, capacity, padded, counts, last)

        return jax.jit(probed_prefill, donate_argnums=1)

    def _evaluate(self, params, cache, capacity, rows, counts, logit_rows):
        spec = self._spec
        target = family.target_of(spec.target)
        logits, _, pending = target.evaluate(
            spec.target, params, cache, capacity, rows, spec.taps, logit_rows, spec.mesh
        )
        return logits, target.commit(spec.target, cache, pending, rows.start, counts)


def _counts(rng: np.random.Generator, left: np.ndarray, room: int) -> np.ndarray:
    """Random lengths of at most `left`, `room` together, not all zero."""
    counts = rng.integers(0, left, endpoint=True)
    while counts.sum() > room:
        counts[rng.choice(np.flatnonzero(counts))] -= 1
    if not counts.any():
        counts[np.flatnonzero(left)[0]] = 1
    return counts.astype(np.int32)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _put(spec: Spec, cache: family.State, context, place: jax.Array) -> family.State:
    """Writes a context into a request's first positions; too long ones are cut."""
    return family.target_of(spec.target).put(spec.target, cache, context, place)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _cut(
    spec: Spec, cache: family.State, place: jax.Array, start: jax.Array, size: int
) -> family.State:
    """A request's positions `start` .. `start + size - 1`."""
    return family.target_of(spec.target).cut(spec.target, cache, place, start, size)
