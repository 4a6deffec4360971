"""Times the sampling and verification ops: `python -m pallas_kernels.verify.bench`.

Prints the hardware, the versions, the shape and the median time of each op, then what
a round draws and judges from its logits: drafts one after the other from rows of the
draft's vocabulary, those rows on the target's ids, and verification with them.
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.draw import draw
from pallas_kernels.filters import argmax_ids, filtered_rows
from pallas_kernels.fixed_point import scale_of
from pallas_kernels.integer_rows import integer_rows, points
from pallas_kernels.noise import noisy_argmax
from pallas_kernels.verify import textbook
from pallas_kernels.verify.api import verify_greedy, verify_rows
from pallas_kernels.verify.arg_specs import DRAFTING, SHAPES, Shape
from pallas_kernels.verify.bench_round import round_arguments, round_ops


def arguments(shape: Shape, seed: int = 0) -> dict[str, jax.Array]:
    """Rows of a draft that is close to its target, and words for one step."""
    rows, vocab = shape
    keys = jax.random.split(jax.random.key(seed), 3)
    target = 3 * jax.random.normal(keys[0], shape, jnp.float32)
    draft = target + 0.5 * jax.random.normal(keys[1], shape, jnp.float32)
    words = jax.random.bits(keys[2], (2, rows), jnp.uint32)
    warm = jnp.ones(rows)
    scale = jnp.asarray(scale_of(np.ones(rows)))
    q = integer_rows(draft, scale)
    ids, offsets = draw(q, points(words[0]))
    return dict(
        logits=target,
        temperature=warm,
        scale=scale,
        top_p=jnp.full(rows, 0.9, jnp.float32),
        top_k=jnp.full(rows, 50, jnp.int32),
        min_p=jnp.full(rows, 0.01, jnp.float32),
        p=integer_rows(target, scale),
        q=q,
        q_float=textbook.probabilities(draft, warm),
        draft_ids=ids,
        offsets=offsets,
        is_verify=jnp.arange(rows) < rows - 1,
        points=points(words[1]),
        words=words[1],
        keys=words.T,
    )


ROW = ("logits", "scale")
FILTERS = ("top_p", "top_k", "min_p")
JUDGED = ("q", "draft_ids", "offsets", "is_verify", "points")
IN_FLOATS = ("logits", "temperature", "q_float", "draft_ids", "is_verify", "words")
OPS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "argmax_ids": (argmax_ids, ("logits",)),
    "integer_rows": (integer_rows, ROW),
    "filtered_rows": (filtered_rows, ROW + FILTERS),
    "draw": (draw, ("p", "points")),
    "integer_rows + draw": (
        lambda x, s, point: draw(integer_rows(x, s), point),
        (*ROW, "points"),
    ),
    "verify_rows": (verify_rows, ("p", *JUDGED)),
    "verify_rows, penalised": (
        lambda *args: verify_rows(*args[:-1], mode="penalised", words=args[-1]),
        ("p", *JUDGED, "keys"),
    ),
    "noisy_argmax": (noisy_argmax, (*ROW, "keys")),
    "verify_greedy": (verify_greedy, ("logits", "draft_ids", "is_verify")),
    "integer_rows + verify_rows": (
        lambda x, s, *rest: verify_rows(integer_rows(x, s), *rest),
        ROW + JUDGED,
    ),
    "filtered_rows + verify_rows": (
        lambda x, s, a, b, c, *rest: verify_rows(filtered_rows(x, s, a, b, c), *rest),
        ROW + FILTERS + JUDGED,
    ),
    "the same in floats, unfiltered": (
        lambda x, t, q, ids, verify, words: textbook.verify_rows(
            textbook.probabilities(x, t), q, ids, verify, words, words
        ),
        IN_FLOATS,
    ),
}


def milliseconds(op: Callable, args: tuple[Any, ...], repeats: int) -> float:
    """Median time of the compiled op."""
    compiled = jax.jit(op)
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main(names: list[str]) -> None:
    """Prints one table per named shape."""
    device = jax.devices()[0]
    print(
        f"{device.platform} {device.device_kind}, {platform.machine()}, "
        f"Python {platform.python_version()}, jax {jax.__version__}, "
        f"jaxlib {metadata.version('jaxlib')}"
    )
    for name in names:
        shape = SHAPES[name]
        args = arguments(shape)
        print(f"\n{name}: R {shape.rows}, V {shape.vocab}, float32")
        for op_name, (op, fields) in OPS.items():
            took = milliseconds(op, tuple(args[f] for f in fields), repeats=30)
            print(f"  {op_name:32s} {took:8.3f} ms")
        if name not in DRAFTING:
            continue
        drafting = DRAFTING[name]
        print(
            f"  of a round, B {drafting.requests}, n {drafting.drafts}, "
            f"V_draft {drafting.vocab}:"
        )
        round_args = round_arguments(shape, drafting)
        for op_name, op in round_ops(round_args).items():
            took = milliseconds(op, (round_args,), repeats=30)
            print(f"  {op_name:32s} {took:8.3f} ms")
        print(f"  load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["smollm2_one_request"])
