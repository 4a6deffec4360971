"""What the host does while rounds run, from a trace of the JAX profiler.

    python scripts/host_trace.py --policy budget --batch 4 --tokens 64

Decodes held-out prompts once to compile and once under the profiler, and adds up the
marks that the host loop leaves. `wait` is time in which the host is idle; as long as
there is any, the device never waits for the host. The trace itself lies in `--out`, for
https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import dspark_jax as dspark
from dspark_jax.evaluation import DOMAINS, held_out
from dspark_jax.evaluation.machine import hardware, versions

MARKS = ("wait", "choose", "launch")
POLICIES = {
    "fixed": dspark.Fixed(),
    "budget": dspark.Budget(),
    "early-stop": dspark.EarlyStop(),
    "gate": dspark.Gate(),
    "threshold": dspark.Threshold(),
}
CAPACITY = 512


def read_marks(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """(begin, length) in microseconds of every mark, by name, from a trace's folder.

    Raises:
      ValueError: no trace lies there.
    """
    files = sorted(folder.rglob("*.trace.json.gz"))
    if not files:
        raise ValueError(f"{folder} holds no trace; was the profiler running?")
    with gzip.open(files[-1], "rt") as file:
        events = json.load(file)["traceEvents"]
    marks: dict[str, list[tuple[float, float]]] = {name: [] for name in MARKS}
    for event in events:
        name = str(event.get("name", "")).removeprefix("dspark.")
        if name in marks and str(event["name"]).startswith("dspark."):
            marks[name].append((float(event["ts"]), float(event["dur"])))
    return {name: sorted(found) for name, found in marks.items()}


def per_round(marks: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    """Milliseconds a round: from one result to the next, and what the host did then.

    Over the rounds between the first and the last wait.
    """
    ends = [begin + length for begin, length in marks["wait"]]
    first, last, rounds = ends[0], ends[-1], len(ends) - 1
    if rounds < 1:
        raise ValueError("one round is not enough; ask for more tokens")
    means = {"round": (last - first) / rounds / 1e3}
    for name, found in marks.items():
        inside = [n for begin, n in found if first <= begin and begin + n <= last]
        means[name] = sum(inside) / rounds / 1e3
    means["text"] = means["round"] - sum(means[name] for name in MARKS)
    means["busy share"] = 1 - means["wait"] / means["round"]
    return means


def trace(
    model: dspark.Model, prompts: list[str], folder: Path, **options: Any
) -> dict[str, float]:
    """Decodes twice, the second time under the profiler."""
    dspark.generate(model, prompts, **options)
    with jax.profiler.trace(str(folder)):
        dspark.generate(model, prompts, **options)
    return per_round(read_marks(folder))


def main() -> None:
    """Prints what a round's time goes into."""
    parser = argparse.ArgumentParser(description="the host's time a round")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="budget")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("runs/host-trace"))
    options = parser.parse_args()
    model = dspark.load(options.model)
    policy = POLICIES[options.policy]
    costs = None
    if not isinstance(policy, dspark.Fixed | dspark.Threshold):
        costs = dspark.profile(model, batch=options.batch, capacity=CAPACITY)
    texts = held_out()
    prompts = [texts[DOMAINS[i % len(DOMAINS)]][i // 5] for i in range(options.batch)]
    means = trace(
        model,
        prompts,
        options.out,
        policy=policy,
        costs=costs,
        max_new_tokens=options.tokens,
        capacity=CAPACITY,
        sampling=dspark.SamplingParams(stop_ids=()),
    )
    console, machine = Console(), hardware()
    found = ", ".join(f"{k} {v}" for k, v in versions().items())
    console.print(f"{machine['device']}, {machine['cores']} cores; {found}")
    console.print(f"{options.policy}, batch {options.batch}; ms a round; {options.out}")
    table = Table(*means)
    table.add_row(*(f"{value:.3f}" for value in means.values()))
    console.print(table)


if __name__ == "__main__":
    main()
