"""Greedy speculative text against plain text, on the default model.

Every held-out prompt is decoded plainly and speculatively at every draft length,
for each dtype and batch size; the first prompts also a second time, plainly and
with the longest drafts, against the first time. Token sequences are compared; a
difference counts by the target's top-2 margin (`near_tie` below 1e-3, else
`mismatch`). The run goes prompt group by prompt group, saves after each, and goes
on where it stopped.

    python scripts/determinism.py --prompts 12 --tokens 128 --minutes 60
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax as dspark
from dspark_jax.evaluation import DOMAINS, held_out
from dspark_jax.evaluation.divergence import judge, top2_margins
from dspark_jax.evaluation.machine import hardware
from dspark_jax.text import render_chat

GROUP = 4
# Prompts of which the same run is also made twice.
REPEATED = 20
INTRODUCTION = """# Determinism of greedy decoding

Held-out prompts of five domains, decoded by the default model plainly and with drafts
of every length: are the tokens the same? A difference would be judged by the target's
top-2 margin (near tie below 1e-3). Of the first twenty prompts a plain and a longest
run are also made twice. `make bench-determinism` runs all 60 prompts, which takes hours
on two cores; the column says how many were run for the table as it stands.

"""


def decode(
    model: dspark.Model, prompts: list[str], batch: int, length: int, tokens: int
) -> list[list[int]]:
    """Token ids of every prompt, decoded `batch` at a time."""
    greedy = dspark.SamplingParams(stop_ids=())
    rows: list[list[int]] = []
    for first in range(0, len(prompts), batch):
        results = dspark.generate(
            model,
            prompts[first : first + batch],
            max_new_tokens=tokens,
            sampling=greedy,
            draft_length=length,
            capacity=512,
        )
        rows += [result.tokens for result in results]
    return rows


def margins(model: dspark.Model, prompt: str, tokens: list[int]) -> np.ndarray:
    """The target's top-2 margin before each of `tokens`."""
    assert model.tokenizer is not None
    text = render_chat(model.tokenizer, prompt)
    ids = model.tokenizer.encode(text, special=False)
    row = jnp.asarray([ids + tokens], jnp.int32)
    lengths = jnp.asarray([row.shape[1]], jnp.int32)
    all_margins = top2_margins(model.spec, model.params, row, lengths)
    return np.asarray(all_margins)[0, len(ids) - 1 :]


def run_group(
    model: dspark.Model, prompts: list[str], batch: int, tokens: int, repeat: bool
) -> dict[str, dict[str, int]]:
    """Verdict counts of one group of prompts, by comparison."""
    gamma = model.spec.gamma
    runs = [
        decode(model, prompts, batch, length, tokens) for length in range(gamma + 1)
    ]
    pairs = [
        (f"{length} drafts / plain", runs[0], runs[length])
        for length in range(1, gamma + 1)
    ]
    if repeat:
        for length, name in ((0, "plain"), (gamma, f"{gamma} drafts")):
            again = decode(model, prompts, batch, length, tokens)
            pairs.append((f"{name} / {name}", runs[length], again))
    counts: dict[str, dict[str, int]] = {}
    for name, first, second in pairs:
        cell = {"same": 0, "near_tie": 0, "mismatch": 0}
        for prompt, one, other in zip(prompts, first, second, strict=True):
            if one == other:
                cell["same"] += 1
                continue
            verdict = judge(one, other, margins(model, prompt, one))
            cell[verdict.verdict] += 1
            print(f"{name}: {prompt[:40]!r} {verdict}")
        counts[name] = cell
    return counts


def table(state: dict) -> str:
    """The run as Markdown."""
    lines = [
        f"{state['machine']}; Python {platform.python_version()}, "
        f"jax {jax.__version__}; {state['tokens']} tokens a prompt, stop tokens "
        "ignored, capacity 512.",
        "",
        "| weights | batch | comparison | prompts | same | near ties | mismatches |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, cells in state["cells"].items():
        dtype, batch = key.split("/")
        for name, cell in cells.items():
            total = sum(cell.values())
            lines.append(
                f"| {dtype} | {batch} | {name} | {total} | {cell['same']} | "
                f"{cell['near_tie']} | {cell['mismatch']} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs groups until all prompts are done or the time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=12, help="of every domain")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--state", type=Path, default=Path("runs/determinism.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/determinism.md"))
    options = parser.parse_args()
    began = time.monotonic()
    jax.config.update("jax_compilation_cache_dir", "runs/compile-cache")

    by_domain = held_out(options.prompts)
    prompts = [
        by_domain[domain][i] for i in range(options.prompts) for domain in DOMAINS
    ]
    state = {
        "machine": hardware()["device"],
        "tokens": options.tokens,
        "done": [],
        "cells": {},
    }
    if options.state.exists():
        state = json.loads(options.state.read_text())
    models: dict[str, dspark.Model] = {}
    for first in range(0, len(prompts), GROUP):
        for dtype in options.dtypes:
            for batch in options.batches:
                step = f"{first}/{dtype}/{batch}"
                spent = (time.monotonic() - began) / 60
                if step in state["done"] or spent > options.minutes:
                    continue
                if dtype not in models:
                    models[dtype] = dspark.load("smollm2-135m", dtype=dtype)
                group = prompts[first : first + GROUP]
                counts = run_group(
                    models[dtype], group, batch, options.tokens, first < REPEATED
                )
                cells = state["cells"].setdefault(f"{dtype}/{batch}", {})
                for name, cell in counts.items():
                    into = cells.setdefault(name, dict.fromkeys(cell, 0))
                    for verdict, count in cell.items():
                        into[verdict] += count
                state["done"].append(step)
                options.state.parent.mkdir(parents=True, exist_ok=True)
                staged = options.state.with_suffix(f".{os.getpid()}")
                staged.write_text(json.dumps(state, indent=1))
                staged.replace(options.state)
                print(f"{step} done after {spent:.1f} min", flush=True)
    text = table(state)
    print(text)
    if options.out != Path("-"):
        options.out.write_text(INTRODUCTION + text)


if __name__ == "__main__":
    main()
