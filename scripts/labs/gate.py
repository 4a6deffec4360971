"""The online gate: its table, its decisions and what its published speeds say.

    python -m scripts.labs.gate
    python -m scripts.labs.gate --confidence 2,1,0,0,-1 --margin 1

Speeds and times are published ones, not measurements of this project. Every number is
an argument.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.plotting import figure_class, save_figure
from dspark_jax.scheduling import (
    GateConfig,
    GateCosts,
    fit_verification,
    gate_decide,
    gate_decide_causal,
    gate_speed,
    linear_costs,
)
from dspark_jax.tables import markdown_table
from scripts.labs import gate_reported

Show = Callable[[str], None]

_speed = jax.jit(gate_speed, static_argnums=0)
_decide = jax.jit(gate_decide, static_argnums=0)
_decide_causal = jax.jit(gate_decide_causal, static_argnums=0)


def calibration(options: argparse.Namespace, config: GateConfig) -> str:
    """How often drafts of a confidence stood."""
    edges = [f"{edge:g}" for edge in config.edges]
    names = [f"< {edges[0]}"]
    names += [f"{a} .. {b}" for a, b in zip(edges, edges[1:], strict=False)]
    names += [f"> {edges[-1]}"]
    rows = [
        [name, f"{float(rate):.0%}", seen]
        for name, rate, seen in zip(names, options.rates, options.seen, strict=True)
    ]
    return markdown_table(["confidence logit", "stood", "drafts"], rows)


def chances(options: argparse.Namespace, config: GateConfig) -> np.ndarray:
    """float32[1, n]: the rate of each confidence's bucket."""
    bucket = np.searchsorted(config.edges, options.confidence, side="right")
    return np.asarray(options.rates, np.float32)[bucket][None]


def decision(options: argparse.Namespace, config: GateConfig, show: Show) -> np.ndarray:
    """Shows the speeds of every length and what is chosen; returns the speeds."""
    p, drafts = jnp.asarray(chances(options, config)), len(options.confidence)
    costs = _costs(options, drafts)
    published = _published(config)
    ahead = jnp.full(1, options.ahead, jnp.float32)
    free = 1000 * np.asarray(_speed(published, p, costs))[0]
    sunk = 1000 * np.asarray(_speed(config, p, costs))[0]
    spent = [options.plain_ms]
    spent += [options.draft_ms + float(costs.verify_ms[n + 1]) for n in range(drafts)]
    rows = [
        [n, f"{free[n] * ms / 1000:.4f}", f"{ms:g}", f"{free[n]:.4f}", f"{sunk[n]:.4f}"]
        for n, ms in enumerate(spent)
    ]
    columns = ["drafts", "expected", "ms", "tokens/s", "tokens/s, draft paid"]
    show(markdown_table(columns, rows))
    show(f"published: verify {int(_decide(published, p, costs)[0])}")
    show(f"a skipped round pays for its draft: {int(_decide(config, p, costs)[0])}")
    causal = int(_decide_causal(config, p, costs, ahead)[0])
    show(f"causal, for drawn tokens (expecting {options.ahead:g} ahead): {causal}")
    return np.stack([free, sunk])


def every_block(options: argparse.Namespace, config: GateConfig, show: Show) -> None:
    """Shows how the forms decide on all blocks, and what they are worth.

    The worth supposes that the confidences of a block are independent and as frequent
    as the table's counts, which they are not; it compares the forms.
    """
    drafts, buckets = len(options.confidence), config.buckets
    index = np.indices((buckets,) * drafts).reshape(drafts, -1).T
    p = jnp.asarray(np.asarray(options.rates, np.float32)[index])
    costs = _costs(options, drafts)
    seen = np.asarray(options.seen, np.float64)
    weight = np.prod((seen / seen.sum())[index], axis=1)
    mean = float(np.dot(seen / seen.sum(), np.asarray(options.rates, float)))
    free = _published(config)
    ahead = jnp.full(len(p), mean, jnp.float32)
    forms = {
        "always": np.full(len(p), drafts),
        "published": np.asarray(_decide(free, p, costs)),
        "draft paid": np.asarray(_decide(config, p, costs)),
        "causal": np.asarray(_decide_causal(config, p, costs, ahead)),
    }
    alive = np.cumprod(np.asarray(p, np.float64), axis=1)
    tokens = 1 + np.pad(np.cumsum(alive, axis=1), ((0, 0), (1, 0)))
    times = options.draft_ms + np.asarray(costs.verify_ms, np.float64)
    times[0] = options.draft_ms + options.plain_ms
    rows = []
    for name, lengths in forms.items():
        counts = np.bincount(lengths, minlength=drafts + 1).tolist()
        got = np.dot(weight, tokens[np.arange(len(lengths)), lengths])
        speed = 1000 * got / np.dot(weight, times[lengths])
        rows.append([name, *counts, f"{speed:.3f}"])
    lengths = [f"verify {n}" for n in range(drafts + 1)]
    show(markdown_table(["form", *lengths, "tokens/s"], rows))
    show(f"plain: {1000 / options.plain_ms:.3f} tokens/s")


def report(options: argparse.Namespace, show: Show) -> None:
    """Shows every table."""
    config = GateConfig(options.edges, options.margin, options.floor)
    show(calibration(options, config))
    base, slope = fit_verification(options.forwarded, options.measured_ms)
    show(f"\nfit by forwarded tokens: {base - slope:.6g} + {slope:.6g} t")
    show(f"the same by drafts: {base:.6g} + {slope:.6g} n\n")
    speeds = decision(options, config, show)
    show("\nall blocks of buckets:\n")
    every_block(options, config, show)
    show("")
    gate_reported.report(options, show)
    if options.plot is not None:
        _draw(options.plot, speeds)


def _published(config: GateConfig) -> GateConfig:
    return GateConfig(config.edges, config.margin, config.floor, skip_pays_draft=False)


def _costs(options: argparse.Namespace, drafts: int) -> GateCosts:
    return linear_costs(
        drafts,
        options.draft_ms,
        options.verify_base_ms,
        options.verify_slope_ms,
        options.plain_ms,
    )


def _draw(path: Path, speeds: np.ndarray) -> None:
    figure = figure_class()(figsize=(4, 3))
    axes = figure.subplots()
    for row, label in zip(speeds, ("published", "draft paid"), strict=True):
        axes.plot(row, "o-", label=label)
    axes.set_xlabel("drafts verified")
    axes.set_ylabel("expected tokens/s")
    axes.legend(fontsize=8)
    figure.tight_layout()
    save_figure(figure, path)


def main(arguments: Sequence[str] | None = None, show: Show = print) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = gate_reported.numbers
    parser.add_argument(
        "--confidence", type=numbers, default=(2.0, 1.0, 0.0, 0.0, -1.0)
    )
    parser.add_argument("--edges", type=numbers, default=GateConfig().edges)
    parser.add_argument("--margin", type=float, default=GateConfig().margin)
    parser.add_argument("--floor", type=int, default=GateConfig().floor)
    rates = (0.2, 0.65, 0.79, 0.89, 1.0, 1.0)
    parser.add_argument("--rates", type=numbers, default=rates, help="by bucket")
    seen = (5, 17, 19, 19, 14, 36)
    parser.add_argument("--seen", type=numbers, default=seen, help="drafts by bucket")
    parser.add_argument("--ahead", type=float, default=0.9, help="for the causal form")
    parser.add_argument("--draft-ms", type=float, default=196.0)
    parser.add_argument("--verify-base-ms", type=float, default=300.0)
    parser.add_argument("--verify-slope-ms", type=float, default=109.0)
    parser.add_argument("--plain-ms", type=float, default=303.0)
    parser.add_argument("--forwarded", type=numbers, default=(1, 2, 3, 6))
    parser.add_argument("--measured-ms", type=numbers, default=(296, 432, 494, 850))
    gate_reported.add_arguments(parser)
    parser.add_argument("--plot", type=Path, help="picture of the speeds")
    options = parser.parse_args(arguments)
    for name in ("rates", "seen"):
        if len(getattr(options, name)) != len(options.edges) + 1:
            parser.error(f"--{name}: one number a bucket, {len(options.edges) + 1}")
    report(options, show)


if __name__ == "__main__":
    main()
