"""What drafts of other shapes cost a round: the other half of every choice of shape.

    python scripts/draft_cost.py --layers 1 2 3 5 --vocab 8192 16384 --draft-length 3

Drafts have random weights, which take as long as trained ones. All rounds are timed in
turns with a plain one; `breaks even` is the accepted length at which a shape is as fast
as plain decoding.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import dspark_jax as dspark
from dspark_jax.config_draft import DraftConfig, dense_config
from dspark_jax.decoding.requests import Variant
from dspark_jax.evaluation.machine import hardware, versions
from dspark_jax.evaluation.timing import RoundChain
from dspark_jax.models.draft import backbone
from dspark_jax.models.params import flatten, for_cpu, random_params
from dspark_jax.spec import Spec
from dspark_jax.training.settings import draft_config, read_recipe

REPEATS = 7


def with_draft(model: dspark.Model, config: DraftConfig) -> dspark.Model:
    """The target with a random draft."""
    shapes = dict(backbone.abstract_draft_params(config))
    rows = shapes.pop("d2t", None)
    params = random_params(shapes, jax.random.key(0))
    if rows is not None:
        params["d2t"] = jnp.arange(rows.shape[0], dtype=jnp.int32)
    spec = Spec(model.spec.target, config, cache_dtype=model.spec.cache_dtype)
    both = {"target": model.params["target"], "draft": params}
    if jax.default_backend() == "cpu":
        both["draft"] = for_cpu(params)
    return dspark.make_model(spec, both)


def chain(model: dspark.Model, drafts: int, variant: Variant) -> RoundChain:
    """Rounds of one request."""
    return RoundChain(model, (1, 256, drafts, variant), drafting=drafts > 0)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--recipe", type=Path, default=Path("recipes/smollm2-135m/recipe.toml")
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--vocab", type=int, nargs="+", default=[16384])
    parser.add_argument("--draft-length", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--variant", default="greedy", choices=["greedy", "sampled"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    target = dspark.load(options.model, None)
    shape = read_recipe(options.recipe).draft
    plain = chain(target, 0, options.variant)
    timed: dict[tuple[int, int, int], RoundChain] = {}
    sizes: dict[tuple[int, int], int] = {}
    for layers in options.layers:
        for vocab in options.vocab:
            own = {"layers": layers, "vocab_size": vocab}
            config = draft_config(
                dense_config(target.spec.target, "this table"),
                type(shape)(**{**vars(shape), **own}),
            )
            model = with_draft(target, config)
            leaves = flatten(backbone.abstract_draft_params(config)).values()
            sizes[layers, vocab] = sum(leaf.size for leaf in leaves)
            for n in options.draft_length:
                timed[layers, vocab, n] = chain(model, n, options.variant)
    for _ in range(REPEATS):
        for one in (plain, *timed.values()):
            one.run()

    base = 1000 * statistics.median(plain.seconds)
    table = Table(
        "layers", "vocabulary", "parameters, M", "drafts", "ms", "breaks even"
    )
    rows = []
    for (layers, vocab, n), one in timed.items():
        took = 1000 * statistics.median(one.seconds)
        row = {
            "layers": layers,
            "vocabulary": vocab,
            "parameters": sizes[layers, vocab],
            "drafts": n,
            "ms": round(took, 2),
            "breaks_even": round(took / base, 3),
        }
        rows.append(row)
        table.add_row(
            str(layers),
            str(vocab),
            f"{sizes[layers, vocab] / 1e6:.1f}",
            str(n),
            f"{took:.2f}",
            f"{took / base:.2f}",
        )
    machine = hardware()
    console = Console()
    console.print(f"{machine}\n{versions()}\nplain round {base:.2f} ms")
    console.print(table)
    if options.output is not None:
        report = {"hardware": machine, "plain_ms": base, "rows": rows}
        options.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
