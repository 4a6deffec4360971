"""The same text under any schedule, on the default model.

Held-out prompts are decoded with `deterministic=True` plainly, with whole blocks, and
under `Budget` and `Gate`, alone and in several places that prompts join and leave, in
two orders of arrival, greedily and with shared noise. Every run's tokens are compared
with plain decoding, one prompt at a time. Each run is saved when it is done, and the
script goes on where it stopped.

    python scripts/any_schedule.py --prompts 60 --tokens 64
"""

from __future__ import annotations

import argparse
import json
import operator
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

import dspark_jax as dspark
from dspark_jax.evaluation import DOMAINS, held_out
from dspark_jax.evaluation.machine import hardware
from dspark_jax.files import replace_text

KINDS = ("greedy", "shared_noise")
NAMES = ("plain", "fixed", "budget", "gate")


def decode(
    model: dspark.Model,
    prompts: list[str],
    order: list[int],
    batch: int,
    kind: str,
    options: dict[str, Any],
    tokens: int,
) -> list[list[int]]:
    """Token ids of every prompt, in the prompts' own order."""
    warm = 0.8 if kind == "shared_noise" else 0.0
    results = dspark.generate(
        model,
        [prompts[index] for index in order],
        max_new_tokens=tokens,
        sampling=[
            dspark.SamplingParams(temperature=warm, seed=index, stop_ids=ends(index))
            for index in order
        ],
        verification="shared_noise" if kind == "shared_noise" else "exact",
        deterministic=True,
        capacity=512,
        batch=batch,
        **options,
    )
    return [
        result.tokens
        for _, result in sorted(
            zip(order, results, strict=True), key=operator.itemgetter(0)
        )
    ]


def ends(index: int) -> tuple[int, ...]:
    """Stop ids: frequent ones for some prompts, so that places are given away."""
    return ((), (198,), (28, 30))[index % 3]


def runs(batches: list[int]) -> Iterator[tuple[str, str, int, bool]]:
    """(kind, name, batch, whether reversed); a kind's first run is its baseline."""
    for kind in KINDS:
        for batch in batches:
            # One at a time, no request knows of another.
            for turned in (False, True) if batch > 1 else (False,):
                for name in NAMES:
                    yield kind, name, batch, turned


def options_for(name: str, batch: int, model: dspark.Model) -> dict[str, Any]:
    """What `generate` is asked for; costs are measured once a batch size."""
    if name == "plain":
        return {"draft_length": 0}
    if name == "fixed":
        return {"policy": dspark.Fixed()}
    path = Path(f"runs/costs-{batch}.json")
    costs = dspark.profile(model, batch=batch, cache=path)
    policy = dspark.Budget() if name == "budget" else dspark.Gate()
    return {"policy": policy, "costs": costs}


def table(state: dict[str, Any], count: int) -> str:
    """What was compared so far, as Markdown."""
    lines = ["| run | batch | order | same tokens |", "|---|---|---|---|"]
    for key, rows in state["rows"].items():
        kind, name, batch, order = key.split("/")
        base = state["rows"][f"{kind}/plain/{state['first']}/straight"]
        same = sum(a == b for a, b in zip(rows, base, strict=True))
        mark = " (baseline)" if rows is base else ""
        lines.append(f"| {kind}, {name} | {batch} | {order} | {same}/{count}{mark} |")
    return "\n".join(lines)


def main() -> None:
    """Makes the runs that are missing, and prints the table after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--state", type=Path, default=Path("runs/any_schedule.json"))
    parser.add_argument("--probed", type=Path, default=Path("runs/equivalence.json"))
    asked = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", "runs/compile-cache")
    began = time.monotonic()

    each = -(-asked.prompts // len(DOMAINS))
    by_domain = held_out(each)
    prompts = [by_domain[domain][i] for i in range(each) for domain in DOMAINS]
    prompts = prompts[: asked.prompts]
    about = {
        "prompts": len(prompts),
        "tokens": asked.tokens,
        "dtype": asked.dtype,
        "first": asked.batches[0],
    }
    state: dict[str, Any] = {**about, "rows": {}}
    if asked.state.exists():
        stored = json.loads(asked.state.read_text())
        if {name: stored.get(name) for name in about} != about:
            raise SystemExit(f"{asked.state} holds other runs; give another --state")
        state = stored
    asked.state.parent.mkdir(parents=True, exist_ok=True)

    model = dspark.load("smollm2-135m", dtype=asked.dtype)
    known = dspark.probe(model, batches=asked.batches, needs=[512], cache=asked.probed)
    print(hardware()["device"], json.dumps(known.to_json()), flush=True)
    for kind, name, batch, turned in runs(asked.batches):
        key = f"{kind}/{name}/{batch}/{'reversed' if turned else 'straight'}"
        spent = (time.monotonic() - began) / 60
        if key in state["rows"] or spent > asked.minutes:
            continue
        order = list(range(len(prompts)))[:: -1 if turned else 1]
        options = options_for(name, batch, model)
        state["rows"][key] = decode(
            model, prompts, order, batch, kind, options, asked.tokens
        )
        replace_text(asked.state, json.dumps(state))
        print(f"{key} done after {(time.monotonic() - began) / 60:.1f} min")
        print(table(state, len(prompts)).splitlines()[-1], flush=True)
    print(table(state, len(prompts)))


if __name__ == "__main__":
    main()
