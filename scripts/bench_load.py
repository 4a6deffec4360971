"""Fixed draft lengths against policies, by how many requests are decoded together.

For each batch size held-out prompts are decoded with every fixed length (0 is plain
decoding) and with every policy, taking turns: a slow minute of the machine falls on
all. There are more prompts than places, so that a place is given to the next one when a
request ends and the load stays what it says but for the last few. Stop tokens are
ignored.

    python scripts/bench_load.py --batches 1 4 --tokens 64 --turns 2

A process of its own for each of the larger sizes keeps below the number of memory maps
that Linux allows: every compiled program takes some.

Printed for each, batch size by batch size: tokens a second over all requests together,
how many drafts were verified and how many tokens came out of a round and request, and
with one place tokens a second domain by domain against plain decoding.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import dspark_jax as dspark
from dspark_jax.evaluation import DOMAINS, held_out
from dspark_jax.evaluation.machine import hardware, versions
from dspark_jax.files import replace_text

CAPACITY = 512


@dataclasses.dataclass
class Total:
    """What one way of decoding did so far."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0

    def add(self, result: dspark.Result, seconds: float) -> None:
        """Takes in a request, and its share of its group's time."""
        self.seconds += seconds
        self.tokens += len(result.tokens) - 1
        self.rounds += result.stats.rounds
        self.drafted += result.stats.drafted

    def to_json(self) -> dict[str, float]:
        """Rates and means."""
        return {
            "tokens_per_second": self.tokens / self.seconds,
            "verified_drafts": self.drafted / self.rounds,
            "accepted_length": self.tokens / self.rounds,
        }


def prompts_for(count: int) -> list[tuple[str, str]]:
    """`count` held-out (domain, prompt) pairs, domains in turn."""
    texts = held_out()
    longest = max(len(texts[domain]) for domain in DOMAINS)
    line = [
        (domain, texts[domain][row])
        for row in range(longest)
        for domain in DOMAINS
        if row < len(texts[domain])
    ]
    # More than there are: begin again.
    return (line * -(-count // len(line)))[:count]


def ways_of(
    model: dspark.Model, batch: int, lengths: Sequence[int], policies: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Options of `generate` by name."""
    ways: dict[str, dict[str, Any]] = {
        f"{n} drafts" if n else "plain": {"draft_length": n} for n in lengths
    }
    if not policies:
        return ways
    costs = dspark.profile(model, batch=batch, capacity=CAPACITY)
    made = {
        "budget": dspark.Budget(),
        "early-stop": dspark.EarlyStop(),
        "gate": dspark.Gate(),
        **{
            f"threshold {s}": dspark.Threshold(survival=s) for s in (0.2, 0.3, 0.4, 0.5)
        },
    }
    for name, policy in made.items():
        if name.split()[0] in policies:
            ways[name] = {"policy": policy, "costs": costs}
    return ways


def run(
    model: dspark.Model, prompts: list[str], batch: int, tokens: int, way: dict
) -> tuple[list[dspark.Result], float]:
    """Results of all prompts, and seconds without compilation."""
    began, compiled = time.perf_counter(), model.programs.seconds
    results = dspark.generate(
        model,
        prompts,
        batch=batch,
        max_new_tokens=tokens,
        sampling=dspark.SamplingParams(stop_ids=()),
        capacity=CAPACITY,
        **way,
    )
    return results, time.perf_counter() - began - (model.programs.seconds - compiled)


def measure(
    model: dspark.Model, batch: int, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """One batch size: totals by way, and whether all texts agree."""
    ways = ways_of(model, batch, options.lengths, options.policies)
    pairs = prompts_for(max(10, options.fill * batch))
    prompts = [text for _, text in pairs]
    for name, way in ways.items():
        # Compiled, and run once: the first run of a program is slower.
        run(model, prompts[: 2 * batch], batch, options.tokens, way)
        console.print(f"batch {batch}, {name}: compiled", style="dim")
    totals: dict[tuple[str, str], Total] = {}
    different = 0
    for turn in range(options.turns):
        texts = {}
        names = list(ways)
        for name in names if turn % 2 == 0 else names[::-1]:
            results, seconds = run(model, prompts, batch, options.tokens, ways[name])
            for (domain, _), result in zip(pairs, results, strict=True):
                share = seconds / len(prompts)
                totals.setdefault((name, "all"), Total()).add(result, share)
                if batch == 1:
                    own = (len(result.tokens) - 1) / result.stats.tokens_per_second
                    totals.setdefault((name, domain), Total()).add(result, own)
            texts[name] = [result.tokens for result in results]
        first = texts[names[0]]
        for row in range(len(prompts)):
            different += any(text[row] != first[row] for text in texts.values())
        console.print(f"batch {batch}: turn {turn + 1} of {options.turns}", style="dim")
    figures = {
        name: {
            domain: totals[name, domain].to_json()
            for domain in ("all", *DOMAINS)
            if (name, domain) in totals
        }
        for name in ways
    }
    requests = len(prompts) * options.turns
    return {"batch": batch, "requests": requests, "ways": figures,
            "different_texts": different}  # fmt: skip


def show(one: dict[str, Any], console: Console) -> None:
    """The table of a batch size."""
    ways, speed = one["ways"], "tokens_per_second"
    rates = {name: row["all"][speed] for name, row in ways.items()}
    fixed = [r for name, r in rates.items() if name == "plain" or "drafts" in name]
    domains = [domain for domain in DOMAINS if domain in next(iter(ways.values()))]
    table = Table(
        "", "tok/s", "to best fixed", "verified", "accepted length",
        *(f"{domain} to plain" for domain in domains),
    )  # fmt: skip
    for name, row in ways.items():
        gains = ["-"] * len(domains)
        if "plain" in ways:
            plain = ways["plain"]
            gains = [f"{row[d][speed] / plain[d][speed]:.2f}" for d in domains]
        table.add_row(
            name,
            f"{rates[name]:.1f}",
            f"{rates[name] / max(fixed):.3f}" if fixed else "-",
            f"{row['all']['verified_drafts']:.2f}",
            f"{row['all']['accepted_length']:.2f}",
            *gains,
        )
    console.print(
        f"batch {one['batch']}: {one['requests']} requests, "
        f"{one['different_texts']} texts differ"
    )
    console.print(table)


def main() -> None:
    """Runs the batch sizes one after the other, printing each when it is done."""
    parser = argparse.ArgumentParser(description="draft lengths and policies by load")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--lengths", type=int, nargs="*", default=[0, 1, 2, 3, 5])
    parser.add_argument("--policies", nargs="*", default=["budget", "gate"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--fill", type=int, default=4, help="prompts a place")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    console = Console()
    model = dspark.load(options.model)
    machine = hardware()
    found = ", ".join(f"{k} {v}" for k, v in versions().items())
    console.print(f"{machine['device']}, {machine['cores']} cores; {found}")
    report: dict[str, Any] = {
        "hardware": machine,
        "versions": versions(),
        "tokens": options.tokens,
        "batches": [],
    }
    for batch in options.batches:
        one = measure(model, batch, options, console)
        report["batches"].append(one)
        if options.output is not None:
            replace_text(options.output, json.dumps(report, indent=2) + "\n")
        show(one, console)


if __name__ == "__main__":
    main()
