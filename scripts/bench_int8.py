"""int8 weights on a CPU: products of the model's shapes, whole rounds, and accuracy.

    python scripts/bench_int8.py                # products
    python scripts/bench_int8.py --rounds       # rounds of the model, with and without
    python scripts/bench_int8.py --accuracy     # against the weights as stored

Everything takes turns in one process. Weights of a shape are several times what caches
hold, and are used in turn. Wall times are lower quintiles; `cpu` is the smallest time
of the process's threads together, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax
from dspark_jax.config_draft import dense_config
from dspark_jax.evaluation.machine import hardware, versions
from dspark_jax.evaluation.prompts import held_out
from dspark_jax.evaluation.timing import RoundChain
from dspark_jax.models import dense, int8, kv_cache, panels
from dspark_jax.models.layers import matmul
from dspark_jax.models.rows import dense_rows

SHAPES = {  # of SmolLM2-135M: [out, in], times a step
    "q, o": (576, 576, 60), "k, v": (192, 576, 60), "gate, up": (1536, 576, 60),
    "down": (576, 1536, 30), "head": (49152, 576, 1),
}  # fmt: skip
CHAIN, CACHES = 12e6, 70e6
LENGTH = 64

Product = Callable[[jax.Array, jax.Array], jax.Array]


def in_whole_numbers(by: Product) -> Product:
    """A product whose sums are exact, with scales of one."""

    def product(x: jax.Array, q: jax.Array) -> jax.Array:
        n, unit = int8.whole_numbers(x)
        return by(n, q).astype(jnp.float32) * unit

    return product


def eight_bits(x: jax.Array, q: jax.Array) -> jax.Array:
    """The values in eight bits as well."""
    unit = jnp.max(jnp.abs(x), axis=1, keepdims=True) / int8.LARGEST
    n = jnp.rint(x / unit).astype(jnp.int8)
    contract = (((1,), (1,)), ((), ()))
    y = jax.lax.dot_general(n, q, contract, preferred_element_type=jnp.int32)
    return y.astype(jnp.float32) * unit


def in_one_loop(x: jax.Array, q: jax.Array) -> jax.Array:
    """int8 to float32 inside a fused multiplication and sum; q is [in, out]."""
    return jnp.sum(q.astype(jnp.float32)[None] * x[:, :, None], axis=1)


WAYS: dict[str, tuple[Callable[[jax.Array], jax.Array], Product]] = {
    "bfloat16": (lambda q: cut(q.astype(jnp.bfloat16)), matmul),
    "int8, digits": (lambda q: q, in_whole_numbers(int8._by_digits)),
    "int8, chunks": (lambda q: q, in_whole_numbers(int8._by_chunks)),
    "int8 x int8": (lambda q: q, eight_bits),
    "to float32": (lambda q: q.T.copy(), in_one_loop),
}


def cut(weight: jax.Array) -> jax.Array:
    """In panels where the library would."""
    # The head stays whole there.
    small = weight.shape[0] < 10_000
    return panels.cut(weight) if small and panels.can_cut(weight) else weight


def chain(product: Product) -> Callable[[jax.Array, list[jax.Array]], jax.Array]:
    """One product after another, each needing the last one's result."""

    def run(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for weight in weights:
            y = product(x, weight)
            x = jax.lax.optimization_barrier(x + 1e-6 * jnp.max(y))
        return x

    return jax.jit(run)


def products(rows: list[int], seconds: float) -> None:
    """Times every way at every shape, and adds them up to a step."""
    steps = {(way, r): np.zeros(2) for way in WAYS for r in rows}
    rng = np.random.default_rng(0)
    for name, (out, width, times) in SHAPES.items():
        size = out * width
        length = max(1, min(12, int(CHAIN // size)))
        sets = max(3, int(CACHES // (size * length)))
        draw = [
            [jnp.asarray(rng.integers(-127, 128, (out, width)), jnp.int8)
             for _ in range(length)] for _ in range(sets)
        ]  # fmt: skip
        jobs = {}
        for way, (form, product) in WAYS.items():
            weights = [[form(q) for q in chained] for chained in draw]
            for r in rows:
                x = jnp.asarray(rng.normal(size=(r, width)), jnp.float32)
                jobs[way, r] = chain(product), x, weights
        taken = take_turns(jobs, seconds)
        for job, (wall, cpu) in taken.items():
            one = np.array([wall, cpu]) / length
            steps[job] += one * times
            read = size * (2 if job[0] == "bfloat16" else 1) / one[0] / 1e9
            print(
                f"{name:9} {out:5} x {width:4}  {job[0]:13} {job[1]} rows "
                f"{1e6 * one[0]:8.0f} us {read:5.1f} GB/s  cpu {1e6 * one[1]:8.0f} us",
                flush=True,
            )
    print("\nall products of a step, ms")
    for (way, r), (wall, cpu) in steps.items():
        base = steps["bfloat16", r]
        print(
            f"{way:13} {r} rows {1e3 * wall:6.1f}, {base[0] / wall:.2f} times as fast; "
            f"cpu {1e3 * cpu:6.1f}, {base[1] / cpu:.2f}"
        )


def take_turns(jobs: dict, seconds: float) -> dict:
    """(wall, cpu) seconds of a chain, by job."""
    for run, x, weights in jobs.values():
        run(x, weights[0]).block_until_ready()
    wall: dict = {job: [] for job in jobs}
    cpu: dict = {job: [] for job in jobs}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(cpu[next(iter(cpu))]) < 3:
        for job, (run, x, weights) in jobs.items():
            spent = time.process_time()
            for chained in weights:
                began = time.perf_counter()
                run(x, chained).block_until_ready()
                wall[job].append(time.perf_counter() - began)
            cpu[job].append((time.process_time() - spent) / len(weights))
    return {job: (np.percentile(wall[job], 20), min(cpu[job])) for job in jobs}


def rounds(name: str, lengths: list[int], repeats: int) -> None:
    """Rounds of the model, one request, greedy."""
    models = {way: dspark_jax.load(name, weights=way) for way in ("float", "int8")}
    chains = {
        (way, n): RoundChain(model, (1, 256, n, "greedy"), drafting=True)
        for way, model in models.items() for n in lengths
    }  # fmt: skip
    cpu: dict = {job: [] for job in chains}
    for _ in range(repeats):
        for job, one in chains.items():
            spent = time.process_time()
            one.run()
            cpu[job].append((time.process_time() - spent) / one._rounds)
    for (way, n), one in chains.items():
        fast = 1e3 * np.percentile(one.seconds, 20)
        print(f"{way:5} {n} drafts {fast:6.1f} ms, cpu {1e3 * min(cpu[way, n]):6.1f}")


def accuracy(name: str, prompts: int) -> None:
    """Next-token laws of held-out prompts, against the weights as stored."""
    models = {w: dspark_jax.load(name, None, weights=w) for w in ("float", "int8")}
    config = dense_config(models["float"].spec.target, "this bench")
    tokenizer = models["float"].tokenizer
    assert tokenizer is not None

    @jax.jit
    def logits(params, tokens, lengths):
        rows = dense_rows(tokens, lengths, jnp.zeros_like(lengths))
        cache = kv_cache.empty_cache(config, 1, LENGTH, jnp.dtype("float32"), False)
        out, _, _ = dense.evaluate(config, params, cache, LENGTH, rows)
        return jax.nn.log_softmax(out, axis=-1)

    everything = []
    for domain, texts in held_out(prompts).items():
        found = []
        for text in texts:
            ids = tokenizer.encode(text)[:LENGTH]
            tokens = np.zeros((1, LENGTH), np.int32)
            tokens[0, : len(ids)] = ids
            p, q = (
                np.asarray(logits(m.params["target"], tokens, np.array([len(ids)])))
                for m in models.values()
            )
            p, q = p[: len(ids)].astype(np.float64), q[: len(ids)].astype(np.float64)
            divergence = np.sum(np.exp(p) * (p - q), axis=-1)
            same = np.argmax(p, axis=-1) == np.argmax(q, axis=-1)
            found.append(np.stack([same, divergence]))
        report(domain, np.concatenate(found, axis=1))
        everything += found
    report("all", np.concatenate(everything, axis=1))


def report(what: str, found: np.ndarray) -> None:
    """Prints the means of [2, positions]."""
    same, divergence = found.mean(axis=1)
    print(f"{what:7} {found.shape[1]:5} positions, first choice the same "
          f"{same:.1%}, KL {divergence:.5f} nats", flush=True)  # fmt: skip


def main() -> None:
    """Reads the options and runs one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=20.0, help="a shape")
    parser.add_argument("--rounds", action="store_true")
    parser.add_argument("--draft-length", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--prompts", type=int, default=4, help="a domain")
    given = parser.parse_args()
    print(hardware(), versions())
    if given.rounds:
        rounds(given.model, given.draft_length, given.repeats)
    elif given.accuracy:
        accuracy(given.model, given.prompts)
    else:
        products(given.rows, given.seconds)


if __name__ == "__main__":
    main()
