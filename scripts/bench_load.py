"""Fixed draft lengths against policies, by how many requests are decoded together.

For each batch size the held-out prompts are decoded with every fixed length (0 is
plain decoding) and with every policy, taking turns group by group: a slow minute
of the machine falls on all. Stop tokens are ignored, so that the load stays what it
says.

    python scripts/bench_load.py --batches 1 2 4 --tokens 64 --groups 2

Printed for each, batch size by batch size: tokens a second over all requests together,
how many drafts were verified and how many tokens came out of a round and request, and
tokens a second domain by domain (each request's share of its group's time).
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


def groups_of(batch: int, count: int) -> list[list[tuple[str, str]]]:
    """`count` groups of `batch` held-out (domain, prompt) pairs, domains in turn."""
    texts = held_out()
    longest = max(len(texts[domain]) for domain in DOMAINS)
    line = [
        (domain, texts[domain][row])
        for row in range(longest)
        for domain in DOMAINS
        if row < len(texts[domain])
    ]
    # More than there are: begin again.
    line *= -(-batch * count // len(line))
    return [line[i * batch : (i + 1) * batch] for i in range(count)]


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
    model: dspark.Model, prompts: list[str], tokens: int, options: dict[str, Any]
) -> tuple[list[dspark.Result], float]:
    """Results of a group, and seconds without compilation and prefill."""
    greedy = dspark.SamplingParams(stop_ids=())
    settings = dict(sampling=greedy, max_new_tokens=tokens, capacity=CAPACITY)
    results: dict[int, dspark.Result] = {}
    began, compiled = None, 0.0
    for piece in dspark.stream(model, prompts, **settings, **options):
        if began is None:
            # The first tokens come out of the prefill.
            began, compiled = time.perf_counter(), model.programs.seconds
        if piece.result is not None:
            results[piece.index] = piece.result
    assert began is not None
    spent = time.perf_counter() - began - (model.programs.seconds - compiled)
    return [results[i] for i in range(len(prompts))], spent


def measure(
    model: dspark.Model, batch: int, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """One batch size: totals by way and domain, and whether all texts agree."""
    ways = ways_of(model, batch, options.lengths, options.policies)
    groups = groups_of(batch, options.groups or max(2, -(-10 // batch)))
    for name, way in ways.items():
        # Compiled, and run as long as later: the first run of a program is slower.
        run(model, [text for _, text in groups[0]], options.tokens, way)
        console.print(f"batch {batch}, {name}: compiled", style="dim")
    totals: dict[tuple[str, str], Total] = {}
    different = 0
    for turn, group in enumerate(groups):
        texts = {}
        names = list(ways)
        for name in names if turn % 2 == 0 else names[::-1]:
            prompts = [text for _, text in group]
            results, seconds = run(model, prompts, options.tokens, ways[name])
            for (domain, _), result in zip(group, results, strict=True):
                for key in ((name, "all"), (name, domain)):
                    totals.setdefault(key, Total()).add(result, seconds / batch)
            texts[name] = [result.tokens for result in results]
        first = texts[names[0]]
        for row in range(batch):
            different += any(text[row] != first[row] for text in texts.values())
        console.print(f"batch {batch}: group {turn + 1} of {len(groups)}", style="dim")
    figures = {
        name: {
            domain: totals[name, domain].to_json()
            for domain in ("all", *DOMAINS)
            if (name, domain) in totals
        }
        for name in ways
    }
    requests = batch * len(groups)
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
    parser.add_argument("--groups", type=int, help="default: for ten requests or more")
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
