"""The verification kernels on a GPU: equality first, then speed.

    scripts/gpu_check.sh            # on a machine with an NVIDIA GPU, jax >= 0.11.2
    python scripts/gpu_check.py --interpret --json out.json   # the same path on a CPU

1. Integer rows of every finite bfloat16 value: XLA on the GPU against the CPU.
2. Kernels against the reference on the CPU and on the GPU, `==`, over vocabularies,
   rows and splits.
3. Time of a verification step by rows, splits and load width, as a share of the
   bandwidth that a copy reaches on the same device; the same step in plain XLA.

Exit status 1 if any bit differs; speed is printed, never judged.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import draw, integer_rows, points, scale_of
from pallas_kernels.mosaic_gpu import Tuning, default_tuning
from pallas_kernels.sample import pallas_mosaic_gpu as sample
from pallas_kernels.sample import reference as sample_reference
from pallas_kernels.verify import pallas_mosaic_gpu as verify
from pallas_kernels.verify import reference as verify_reference

CPU = jax.devices("cpu")[0]


def step_arguments(rows: int, vocab: int, dtype: Any, seed: int) -> tuple[Any, ...]:
    """A draft near its target; greedy, cold and warm rows; one row without a law."""
    rng = np.random.default_rng(seed)
    target = rng.normal(size=(rows, vocab)).astype(np.float32) * 3
    draft = target + rng.normal(size=(rows, vocab)).astype(np.float32)
    if rows > 3:
        target[1], target[2] = 0, -np.inf
        target[2, vocab // 2] = 1
        target[3, 5] = np.nan
    scale = scale_of(rng.choice([0.0, 0.02, 0.7, 1.0], rows))
    words = rng.integers(0, 2**32, (2, rows), np.uint64).astype(np.uint32)
    with jax.default_device(CPU):
        drafted = integer_rows(jnp.asarray(draft), jnp.asarray(scale))
        ids, offsets = draw(drafted, points(jnp.asarray(words[0])))
        fresh = points(jnp.asarray(words[1]))
    source = rng.permutation(rows).astype(np.int32)
    pool = np.zeros((rows, vocab), np.int32)
    pool[source] = drafted
    return (
        np.asarray(jnp.asarray(target, dtype)),
        scale,
        pool,
        source,
        np.asarray(ids),
        np.asarray(offsets),
        np.arange(rows) % 6 != 5,
        np.asarray(fresh),
    )


def bits(tree: Any) -> list[np.ndarray]:
    """Results as comparable arrays."""
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def same(one: Any, other: Any) -> bool:
    """Whether all results are equal."""
    return all(
        a.dtype == b.dtype and np.array_equal(a, b)
        for a, b in zip(bits(one), bits(other), strict=True)
    )


def every_bfloat16(device: Any) -> bool:
    """Whether the device's rows of all finite bfloat16 logits are the CPU's."""
    patterns = np.arange(2**16, dtype=np.uint16)
    values = patterns.view(jnp.bfloat16).astype(np.float32)
    values = values[np.isfinite(values)]
    # Rows end at different maxima, as the maximum is subtracted first.
    rows = np.stack([values, np.where(values > 50, -np.inf, values)])
    scale = scale_of(np.asarray([1.0, 0.3]))

    def on(where: Any) -> Any:
        args = jax.device_put((rows, scale), where)
        return jax.jit(integer_rows)(*args)

    return same(on(CPU), on(device))


def compare(device: Any, sizes: Any, interpret: Any) -> list[dict[str, Any]]:
    """Kernels against the reference on the CPU and on the device."""
    results = []
    for seed, (vocab, rows, splits, dtype) in enumerate(sizes):
        args = step_arguments(rows, vocab, dtype, seed)
        drawn = (args[0], args[1], args[-1])
        how = dict(tuning=Tuning(splits=splits), interpret=interpret)
        checks = {
            "verify": (verify.verify_logits, verify_reference.verify_logits, args),
            "sample": (sample.sample_logits, sample_reference.sample_logits, drawn),
        }
        for name, (kernel, reference, given) in checks.items():
            there, here = jax.device_put(given, device), jax.device_put(given, CPU)
            expected = jax.jit(reference)(*here)
            got = jax.jit(functools.partial(kernel, **how))(*there)
            results.append(
                dict(
                    op=name,
                    vocab=vocab,
                    rows=rows,
                    splits=splits,
                    dtype=jnp.dtype(dtype).name,
                    kernel_is_cpu=same(got, expected),
                    plain_is_cpu=same(jax.jit(reference)(*there), expected),
                )
            )
            print(json.dumps(results[-1]), flush=True)
    return results


def seconds(step: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> float:
    """Time of one step: the best of five loops of `repeats` in one program."""

    @jax.jit
    def loop(*args: Any) -> Any:
        def once(i: jax.Array, last: jax.Array) -> jax.Array:
            # The points move with the loop, so that nothing is computed only once.
            moved = (args[-1] + i + last) & (2**30 - 1)
            out = step(*args[:-1], moved)
            used = [jnp.sum(x).astype(jnp.int32) for x in jax.tree.leaves(out)]
            return functools.reduce(jnp.add, used) & 1

        return jax.lax.fori_loop(0, repeats, once, jnp.int32(0))

    jax.block_until_ready(loop(*args))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(loop(*args))
        best = min(best, time.perf_counter() - start)
    return best / repeats


def copy_bandwidth(device: Any, size: int, repeats: int) -> float:
    """Bytes a second, read and written, of adding one to a large array."""
    x = jax.device_put(np.zeros(size // 4, np.int32), device)
    loop = jax.jit(
        lambda x: jax.lax.fori_loop(0, repeats, lambda i, x: x + i, x),
        donate_argnums=0,
    )
    x = jax.block_until_ready(loop(x))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        x = jax.block_until_ready(loop(x))
        best = min(best, time.perf_counter() - start)
    return 2 * size * repeats / best


def step_bytes(rows: int, vocab: int, dtype: Any) -> int:
    """Bytes a step has to read at least: the logits once and the draft rows once."""
    return rows * vocab * (jnp.dtype(dtype).itemsize + 4)


def timings(
    device: Any,
    vocab: int,
    all_rows: tuple[int, ...],
    bandwidth: float,
    repeats: int,
    interpret: Any,
) -> list[dict[str, Any]]:
    """Times a step by layout, and in plain XLA, one after the other."""
    results = []
    dtype = jnp.bfloat16
    for rows in all_rows:
        args = jax.device_put(step_arguments(rows, vocab, dtype, rows), device)
        plain = seconds(verify_reference.verify_logits, args, repeats)
        default = default_tuning(rows, vocab)
        layouts = [
            Tuning(splits, load)
            for splits, load in itertools.product((4, 8, 16, 32), (8, 16))
        ]
        if interpret is not None:
            layouts = [default]
        elif default not in layouts:
            layouts.append(default)
        for tuning in layouts:
            kernel = functools.partial(
                verify.verify_logits, tuning=tuning, interpret=interpret
            )
            took = seconds(kernel, args, repeats)
            share = step_bytes(rows, vocab, dtype) / took / bandwidth
            results.append(
                dict(
                    rows=rows,
                    vocab=vocab,
                    splits=tuning.splits,
                    load_bytes=tuning.load_bytes,
                    default=tuning == default,
                    microseconds=1e6 * took,
                    share_of_copy=share,
                    plain_over_kernel=plain / took,
                )
            )
            print(json.dumps(results[-1]), flush=True)
    return results


def table(results: list[dict[str, Any]]) -> str:
    """Markdown of `timings`."""
    lines = [
        "| rows | splits | load bytes | µs | share of copy speed | plain / kernel |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        mark = " (default)" if r["default"] else ""
        lines.append(
            f"| {r['rows']} | {r['splits']}{mark} | {r['load_bytes']} "
            f"| {r['microseconds']:.1f} | {r['share_of_copy']:.2f} "
            f"| {r['plain_over_kernel']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument(
        "--interpret", action="store_true", help="small sizes, on a CPU, no GPU needed"
    )
    options = parser.parse_args()
    interpret, device = None, jax.devices()[0]
    if options.interpret:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpret = plgpu.InterpretGPUParams(detect_races=True)
    elif device.platform != "gpu":
        print(f"the default device is a {device.platform}; this needs an NVIDIA GPU")
        return 2
    else:
        assert float(device.compute_capability) >= 8.0, device.compute_capability
    print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
    if interpret is None:
        sizes = list(
            itertools.product(
                (128, 1000, 50257, 151936), (1, 7, 64), (1, 5, 16), (jnp.bfloat16,)
            )
        )
        sizes += [(151936, 6, 16, jnp.float32), (5000, 6, 3, jnp.float32)]
    else:
        sizes = [(128, 1, 1, jnp.float32), (2500, 7, 2, jnp.bfloat16)]
    conversions = every_bfloat16(device)
    print(f"rows of all bfloat16 values equal the CPU's: {conversions}", flush=True)
    equal = compare(device, sizes, interpret)
    good = conversions and all(r["kernel_is_cpu"] and r["plain_is_cpu"] for r in equal)
    print(f"equality: {len(equal)} checks, {'all equal' if good else 'DIFFERENCES'}")
    if interpret is None:
        bandwidth = copy_bandwidth(device, 1 << 30, 50)
        times = timings(device, 151936, (6, 24, 96, 384), bandwidth, 50, None)
    else:
        bandwidth = copy_bandwidth(device, 1 << 24, 2)
        times = timings(device, 2500, (6,), bandwidth, 1, interpret)
    print(f"\n{device.device_kind}: copy {bandwidth / 1e9:.0f} GB/s\n\n{table(times)}")
    if options.json:
        report = dict(
            device=device.device_kind,
            jax=jax.__version__,
            interpret=options.interpret,
            conversions_equal=conversions,
            copy_bytes_per_second=bandwidth,
            equality=equal,
            timings=times,
        )
        options.json.write_text(json.dumps(report, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
