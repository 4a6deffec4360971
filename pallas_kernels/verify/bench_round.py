"""What a round draws and judges, as `pallas_kernels.verify.bench` times it.

Drafts come one after the other, each from a row of its own on the draft's vocabulary;
those rows are spread over the target's ids and judged with the target's rows.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fixed_point import scale_of
from pallas_kernels.integer_rows import points
from pallas_kernels.sample.api import argmax_ids, sample_logits
from pallas_kernels.verify.api import verify_logits
from pallas_kernels.verify.arg_specs import Drafting, Shape
from pallas_kernels.verify.rows import VerifiedRows


class RoundArgs(NamedTuple):
    """Arguments of one round's draws; arrays of B requests and n drafts.

    target: float32[B (n + 1), V]. Rows of a request behind each other.
    draft: float32[n, B, V_draft].
    t2d: int32[V]. Column of each token in the draft's rows, V_draft where it has none.
    words: uint32[n, B].
    points: int32[B (n + 1)].
    """

    target: jax.Array
    draft: jax.Array
    t2d: jax.Array
    words: jax.Array
    points: jax.Array


def round_arguments(shape: Shape, drafting: Drafting, seed: int = 0) -> RoundArgs:
    """Rows of a draft that is close to its target on the ids that it knows."""
    requests, count, width = drafting
    keys = jax.random.split(jax.random.key(seed), 5)
    target = 3 * jax.random.normal(keys[0], shape, jnp.float32)
    known = jnp.sort(jax.random.permutation(keys[1], shape.vocab)[:width])
    near = target.reshape(requests, count + 1, -1)[:, :count, known].swapaxes(0, 1)
    draft = near + 0.5 * jax.random.normal(keys[2], near.shape, jnp.float32)
    order = jnp.arange(width, dtype=jnp.int32)
    t2d = jnp.full(shape.vocab, width, jnp.int32).at[known].set(order)
    words = jax.random.bits(keys[3], (count, requests), jnp.uint32)
    fresh = jax.random.bits(keys[4], (shape.rows,), jnp.uint32)
    return RoundArgs(target, draft, t2d, words, points(fresh))


def draw_drafts(args: RoundArgs) -> tuple[jax.Array, ...]:
    """(columns, offsets, rows) of all drafts, one after the other as in a round."""
    scale = jnp.full(args.draft.shape[1], scale_of(np.ones(())))

    def one(carry: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple]:
        return carry, tuple(sample_logits(xs[0], scale, points(xs[1])))

    return jax.lax.scan(one, None, (args.draft, args.words))[1]


def draft_in_turn(args: RoundArgs) -> jax.Array:
    """Columns of greedy drafts, one after the other."""
    return jax.lax.scan(lambda _, x: (None, argmax_ids(x)), None, args.draft)[1]


def on_target_ids(args: RoundArgs, rows: jax.Array) -> jax.Array:
    """Draft rows [n, B, V_draft] as [B n, V], request by request."""
    flat = rows.swapaxes(0, 1).reshape(-1, rows.shape[2])
    return jnp.take(flat, args.t2d, axis=1, mode="fill", fill_value=0)


def judge(args: RoundArgs, drawn: tuple[jax.Array, ...]) -> VerifiedRows:
    """Verdicts on the target's rows with rows of drafts on its ids."""
    columns, offsets, rows = drawn
    count, requests = columns.shape
    step = jnp.arange(len(args.target), dtype=jnp.int32) % (count + 1)
    request = jnp.arange(len(args.target), dtype=jnp.int32) // (count + 1)
    at = jnp.minimum(step, count - 1)
    known = jnp.nonzero(args.t2d < args.draft.shape[2], size=args.draft.shape[2])[0]
    ids = known[columns].astype(jnp.int32)[at, request]
    scale = jnp.full(len(args.target), scale_of(np.ones(())))
    return verify_logits(
        args.target, scale, rows, request * count + at, ids, offsets[at, request],
        step < count, args.points,
    )  # fmt: skip


def whole_round(args: RoundArgs) -> VerifiedRows:
    """Drafts drawn and judged: all of a sampled round but its two models."""
    columns, offsets, rows = draw_drafts(args)
    return judge(args, (columns, offsets, on_target_ids(args, rows)))


def round_ops(args: RoundArgs) -> dict[str, Callable[[RoundArgs], Any]]:
    """The parts of a round, each of the round's arguments alone."""
    columns, offsets, rows = jax.jit(draw_drafts)(args)
    wide = jax.jit(on_target_ids)(args, rows)
    return {
        "greedy drafts": draft_in_turn,
        "drafts drawn": draw_drafts,
        "rows on the target's ids": functools.partial(on_target_ids, rows=rows),
        "drafts judged": functools.partial(judge, drawn=(columns, offsets, wide)),
        "drawn and judged": whole_round,
    }
