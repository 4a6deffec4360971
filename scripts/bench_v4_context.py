"""What a step costs by context length: DeepSeek-V4's layers and full attention.

Small models of one kind of layer each evaluate a block of two
rows behind a context of so many positions and commit them. Steps of all models take
turns. A window costs the same everywhere; a layer that selects scores context / 4
entries; a layer of ratio 128 sees context / 128; full attention reads every position.

    python scripts/bench_v4_context.py --contexts 1024 4096 16384 65536
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from dspark_jax.checkpoint.v4_config import v4_config
from dspark_jax.config import AttentionConfig, DecoderConfig
from dspark_jax.config_draft import TargetConfig
from dspark_jax.config_v4 import V4Config
from dspark_jax.evaluation.machine import hardware, versions
from dspark_jax.files import replace_text
from dspark_jax.models import family
from dspark_jax.models.params import random_params
from dspark_jax.models.rows import dense_rows
from dspark_jax.testing.tiny_v4 import tiny_v4_json

LAYERS, ROWS = 2, 2
RATIOS = {
    "window only": (0,) * LAYERS,
    "ratio 4": (4,) * LAYERS,
    "ratio 128": (128,) * LAYERS,
}


def models() -> dict[str, TargetConfig]:
    """One model a kind, of the same width and number of heads."""
    found: dict[str, TargetConfig] = {}
    for name, ratios in RATIOS.items():
        found[name] = v4_config(
            tiny_v4_json(compress_ratios=list(ratios), num_hidden_layers=LAYERS)
        )
    one = found["window only"]
    assert isinstance(one, V4Config)
    found["full attention"] = DecoderConfig(
        architecture="qwen3",
        vocab_size=one.vocab_size,
        hidden_size=one.hidden_size,
        intermediate_size=one.moe_dim * (one.experts_per_token + 1),
        num_heads=one.num_heads,
        layer_types=("full",) * LAYERS,
        # One shared head, as in the other models.
        full=AttentionConfig(num_kv_heads=1, head_dim=one.head_dim),
        max_position=one.max_position,
    )
    return found


class Step:
    """Repeats one step of a model behind a context; the state goes round in place."""

    def __init__(self, config: TargetConfig, context: int):
        """Compiles it; what the context holds does not matter for its time."""
        of = family.target_of(config)
        params = random_params(of.abstract_params(config), jax.random.key(0))
        self._params = of.for_cpu(config, params)
        self._state = of.empty_state(config, 1, context, jnp.dtype("float32"))
        start = jnp.asarray([context - ROWS - 1], jnp.int32)
        count = jnp.asarray([ROWS], jnp.int32)

        def run(params: Any, state: Any) -> tuple[Any, jax.Array]:
            rows = dense_rows(jnp.zeros((1, ROWS), jnp.int32), count, start)
            logits, _, pending = of.evaluate(config, params, state, context, rows)
            return of.commit(config, state, pending, start, count), logits

        self._run: Callable[..., Any] = jax.jit(run, donate_argnums=1)
        self.once()

    def once(self) -> float:
        """Milliseconds of one step."""
        began = time.perf_counter()
        self._state, logits = self._run(self._params, self._state)
        jax.block_until_ready(logits)
        return 1e3 * (time.perf_counter() - began)


def main() -> None:
    """Prints a table, and what a thousand positions add."""
    parser = argparse.ArgumentParser(description="cost of a step by context length")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 65536]
    )
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    console, machine = Console(), hardware()
    found = ", ".join(f"{k} {v}" for k, v in versions().items())
    console.print(f"{machine['device']}, {machine['cores']} cores; {found}")
    names = list(models())
    medians: dict[str, list[float]] = {name: [] for name in names}
    for context in options.contexts:
        steps = {name: Step(config, context) for name, config in models().items()}
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(options.repeats):
            for name, step in steps.items():
                times[name].append(step.once())
        for name in names:
            medians[name].append(float(np.median(times[name])))
    table = Table("context", *names, title=f"ms a step of {ROWS} rows, {LAYERS} layers")
    for i, context in enumerate(options.contexts):
        table.add_row(f"{context:,}", *(f"{medians[n][i]:.2f}" for n in names))
    thousands = np.asarray(options.contexts) / 1024
    slopes = {n: float(np.polyfit(thousands, medians[n], 1)[0]) for n in names}
    table.add_row("per 1024", *(f"{slopes[n]:+.4f}" for n in names))
    console.print(table)
    if options.output is not None:
        report = {"hardware": machine, "versions": versions(), "slopes": slopes,
                  "contexts": options.contexts, "ms": medians}  # fmt: skip
        replace_text(options.output, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
