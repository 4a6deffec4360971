"""Times the sampling and verification ops: `python -m pallas_kernels.verify.bench`.

Prints the hardware, the versions, the shape and the median time of each op.
"""

import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata

import jax
import jax.numpy as jnp

from pallas_kernels.draw import draw
from pallas_kernels.filters import (
    argmax_ids,
    filtered_probabilities,
    probabilities,
)
from pallas_kernels.verify.api import verify_greedy, verify_rows
from pallas_kernels.verify.arg_specs import SHAPES, Shape
from pallas_kernels.words import uniform


def arguments(shape: Shape, seed: int = 0) -> dict[str, jax.Array]:
    """Rows of a draft that is close to its target, and words for one step."""
    rows, vocab = shape
    keys = jax.random.split(jax.random.key(seed), 3)
    target = 3 * jax.random.normal(keys[0], shape, jnp.float32)
    words = jax.random.bits(keys[2], (3, rows), jnp.uint32)
    q = probabilities(
        target + 0.5 * jax.random.normal(keys[1], shape, jnp.float32), jnp.ones(rows)
    )
    return dict(
        logits=target,
        temperature=jnp.ones(rows),
        top_p=jnp.full(rows, 0.9, jnp.float32),
        top_k=jnp.full(rows, 50, jnp.int32),
        min_p=jnp.full(rows, 0.01, jnp.float32),
        p=probabilities(target, jnp.ones(rows)),
        q=q,
        u=uniform(words[0]),
        draft_ids=draw(q, uniform(words[0])),
        is_verify=jnp.arange(rows) < rows - 1,
        accept_words=words[1],
        token_words=words[2],
    )


ROW = ("logits", "temperature")
FILTERS = ("top_p", "top_k", "min_p")
JUDGED = ("q", "draft_ids", "is_verify", "accept_words", "token_words")
OPS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "argmax_ids": (argmax_ids, ("logits",)),
    "probabilities": (probabilities, ROW),
    "filtered_probabilities": (filtered_probabilities, ROW + FILTERS),
    "draw": (draw, ("p", "u")),
    "verify_rows": (verify_rows, ("p", *JUDGED)),
    "verify_greedy": (verify_greedy, ("logits", "draft_ids", "is_verify")),
    "probabilities + verify_rows": (
        lambda x, t, *rest: verify_rows(probabilities(x, t), *rest),
        ROW + JUDGED,
    ),
    "filtered + verify_rows": (
        lambda x, t, a, b, c, *rest: verify_rows(
            filtered_probabilities(x, t, a, b, c), *rest
        ),
        ROW + FILTERS + JUDGED,
    ),
}


def milliseconds(op: Callable, args: tuple[jax.Array, ...], repeats: int) -> float:
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
            print(f"  {op_name:28s} {took:8.3f} ms")


if __name__ == "__main__":
    main(sys.argv[1:] or ["smollm2_one_request"])
