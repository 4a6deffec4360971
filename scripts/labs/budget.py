"""The budget search on small numbers: how many rows a round gets, and who gets them.

    python -m scripts.labs.budget
    python -m scripts.labs.budget --slope 5
    python -m scripts.labs.budget --newer 0.9,0.8,0.5 0.8,0.5,0.25
    python -m scripts.labs.budget --total 9

Confidences are raw, an argument for each request. Published throughputs are estimates
of others, not measurements of this project.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dspark_jax.plotting import figure_class, save_figure
from dspark_jax.scheduling.budget import choose_total, curve, size_ms
from dspark_jax.scheduling.profiling import trimmed_mean
from dspark_jax.tables import markdown_table
from pallas_kernels import allocate, carried, survival

Show = Callable[[str], None]
Rows = Sequence[tuple[Fraction, ...]]
Points = tuple[tuple[int, Fraction], ...]

CURVES = {
    "flat": "2:10,4:10,6:10,8:10",
    "stairs": "2:8,4:10,6:12,8:28",
    "steep": "2:8,4:10,6:22,8:38",
    "steep, second graph 5": "2:8,5:10,6:22,8:38",
}


def cumulative(raw: Rows) -> Rows:
    """Running products, exactly."""
    out = []
    for row in raw:
        alive, products = Fraction(1), []
        for c in row:
            alive *= c
            products.append(alive)
        out.append(tuple(products))
    return tuple(out)


def candidates(
    values: Rows, points: Points, slope: Fraction, sampler: Fraction
) -> list[tuple[int, int, Fraction, Fraction, Fraction]]:
    """(positions, graph, expected, time, output / time) of every total that fits."""
    queue = sorted((v for row in values for v in row), reverse=True)
    rows = []
    for bought in range(len(queue) + 1):
        total = len(values) + bought
        size, ms = next(((g, ms) for g, ms in points if g >= total), (0, Fraction(0)))
        if size:
            expected = len(values) + sum(queue[:bought], Fraction(0))
            time = ms + max(Fraction(0), slope) * size + sampler
            rows.append((total, size, expected, time, expected / time))
    return rows


def chosen(values: Rows, points: Points, slope: Fraction, sampler: Fraction) -> int:
    """The total that the library's search picks."""
    sizes, ms = zip(*points, strict=True)
    total, _ = choose_total(
        survival(_floats(values)),
        jnp.ones(len(values), bool),
        curve(sizes, [float(x) for x in ms]),
        float(slope),
        float(sampler),
    )
    return int(total)


def lengths(raw: Rows, total: int) -> list[int]:
    """Rows of each request."""
    return allocate(survival(_floats(raw)), jnp.int32(total)).tolist()


def on_the_device(
    raw: Rows, source: Sequence[int], total: int, fill: float
) -> list[int]:
    """Rows of each request when rows without a predecessor are filled with a number."""
    index = jnp.asarray(source, jnp.int32)
    values = carried(survival(_floats(raw)), index)
    filled = jnp.where((index >= 0)[:, None], values, fill)
    return allocate(filled, jnp.int32(total)).tolist()


def report(options: argparse.Namespace, show: Show) -> None:
    """Shows every table."""
    slope, sampler, points = options.slope, options.sampler, options.curve
    for name, raw in (("older", options.older), ("newer", options.newer)):
        show(f"{name}: raw {_plain(raw)}, cumulative {_plain(cumulative(raw))}")
    older = cumulative(options.older)
    show("")
    rows = candidates(older, points, slope, sampler)
    columns = ["positions", "graph", "expected", "time", "output/time"]
    show(
        markdown_table(
            columns,
            [
                [total, size, f"{float(e):.2f}", f"{float(t):g}", f"{float(s):.4f}"]
                for total, size, e, t, s in rows
            ],
        )
    )
    total = chosen(options.older, points, slope, sampler)
    show(f"chosen total {total}, from the older confidences alone")
    show(f"lengths from the newer confidences {lengths(options.newer, total)}")
    show(f"lengths from the older confidences {lengths(options.older, total)}\n")

    table = []
    for name, text in CURVES.items():
        best = chosen(options.older, _points(text), slope, sampler)
        table.append(
            [
                name,
                text,
                best,
                lengths(options.newer, best),
                lengths(options.older, best),
            ]
        )
    columns = ["curve", "graph:ms", "total", "newer", "older"]
    show(markdown_table(columns, table))

    times = [float(ms) for ms in options.timings]
    show(f"\ntimings {_list(options.timings)} trim to {trimmed_mean(times):g}")
    size, ms = options.forward
    slope = float(options.forward_slope)
    forward = size_ms(curve([int(size)], [float(ms)]), slope, float(sampler))
    show(
        f"{ms} at {size} positions, slope {slope:g}, sampler {sampler}: "
        f"{float(forward[0]):g}\n"
    )
    device(options, show)
    show("\npublished estimates, tokens/s:\n")
    show(throughput(options))
    if options.plot is not None:
        _draw(options.plot, rows, total)


def device(options: argparse.Namespace, show: Show) -> None:
    """Shows the shares of a batch in which a request has no predecessor."""
    raw, source = options.previous, options.remap
    totals = [options.total] if options.total else list(options.totals)
    table = []
    for total in totals:
        zeros, ones = (on_the_device(raw, source, total, fill) for fill in (0.0, 1.0))
        table.append([total, zeros, ones, sum(zeros), sum(ones)])
    show(f"remap {list(source)}, confidences before {_plain(raw)}")
    columns = ["total", "device", "host, filled with ones", "sum", "sum"]
    show(markdown_table(columns, table))
    positive = sum(
        value > 0 for place in source if place >= 0 for value in cumulative(raw)[place]
    )
    show(f"drafts with a positive value: {positive}; the rest goes to zeros in order")


def throughput(options: argparse.Namespace) -> str:
    """Published throughput with the gain recomputed."""
    rows = []
    for users, fixed, dynamic in options.throughput:
        gain = float(dynamic / fixed - 1)
        rows.append([users, fixed, dynamic, f"{gain:+.1%}"])
    return markdown_table(["concurrency", "fixed five", "dynamic", "gain"], rows)


def _floats(rows: Rows) -> jnp.ndarray:
    return jnp.asarray(np.asarray(rows, np.float64), jnp.float32)


def _plain(rows: Rows) -> str:
    return " / ".join(_list(row) for row in rows)


def _list(values: Sequence[Fraction]) -> str:
    return ", ".join(f"{float(v):g}" for v in values)


def _draw(path: Path, rows: list[tuple], total: int) -> None:
    figure = figure_class()(figsize=(4, 3))
    axes = figure.subplots()
    axes.plot([row[0] for row in rows], [float(row[4]) for row in rows], "o-")
    axes.axvline(total, color="0.7", linewidth=0.8)
    axes.set_xlabel("positions")
    axes.set_ylabel("output/time")
    figure.tight_layout()
    save_figure(figure, path)


def _row(text: str) -> tuple[Fraction, ...]:
    return tuple(Fraction(part) for part in text.split(","))


def _chances(text: str) -> tuple[Fraction, ...]:
    row = _row(text)
    if not all(0 <= c <= 1 for c in row):
        raise argparse.ArgumentTypeError(f"{text}: numbers in [0, 1]")
    return row


def _points(text: str) -> Points:
    pairs = (part.split(":") for part in text.split(","))
    return tuple((int(size), Fraction(ms)) for size, ms in pairs)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main(arguments: Sequence[str] | None = None, show: Show = print) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name: str, kind: Callable, default: str) -> None:
        parser.add_argument(name, type=kind, default=kind(default), help=default)

    def add_rows(name: str, kind: Callable, default: str) -> None:
        rows = tuple(kind(row) for row in default.split())
        parser.add_argument(name, type=kind, nargs="+", default=rows, help=default)

    add_rows("--older", _chances, "0.9,0.8,0.5 0.8,0.5,0.25")
    add_rows("--newer", _chances, "0.6,0.3,0.2 0.95,0.9,0.9")
    add("--curve", _points, CURVES["stairs"])
    add("--slope", Fraction, "0")
    add("--sampler", Fraction, "2")
    add("--timings", _row, "9,10,11,12,40")
    add("--forward", _row, "6,10")
    add("--forward-slope", Fraction, "0.5")
    add_rows("--previous", _chances, "0.9,0.8 0.6,0.5")
    add("--remap", _ints, "0,-1,1")
    add("--totals", _ints, "7,8")
    parser.add_argument("--total", type=int, help="instead of --totals")
    published = (
        "16,4891,4816 32,8964,9111 48,12032,12467 "
        "60,13730,14466 72,14962,15961 96,16817,18660"
    )
    add_rows("--throughput", _row, published)
    parser.add_argument("--plot", type=Path, help="picture of the candidates")
    options = parser.parse_args(arguments)
    for name in ("older", "newer", "previous"):
        if len({len(row) for row in getattr(options, name)}) != 1:
            parser.error(f"--{name}: requests with different numbers of drafts")
    if not all(-1 <= place < len(options.previous) for place in options.remap):
        parser.error(f"--remap: rows of --previous or -1, not {options.remap}")
    report(options, show)


if __name__ == "__main__":
    main()
