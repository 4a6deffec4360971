"""The acceptance rule on small laws, with exact fractions.

    python -m scripts.labs.acceptance
    python -m scripts.labs.acceptance --alpha 99/100
    python -m scripts.labs.acceptance --integer 60

The standard rule takes what replaces a fallen draft from max(P - Q, 0), the penalised
one from max(P - alpha Q, 0). The tables show what is emitted under both. `--integer S`
adds the law that the serving functions have on integer rows of total S, with every
random point tried, and a word for every unit of a residual.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from dspark_jax.config import require
from dspark_jax.plotting import figure_class, save_figure
from dspark_jax.tables import markdown_table
from pallas_kernels.verify import penalised

Law = tuple[Fraction, ...]

# Up to S^2 rows are tried.
LARGEST_TOTAL = 600


def residual(p: Law, q: Law, alpha: Fraction) -> Law:
    """Weights of a replacement: max(p - alpha q, 0)."""
    return tuple(max(a - alpha * b, Fraction(0)) for a, b in zip(p, q, strict=True))


def shares(weights: Law) -> Law:
    """Weights normalised; all 0 where there is nothing to replace with."""
    mass = sum(weights, Fraction(0))
    return tuple(w / mass if mass else mass for w in weights)


def mean_acceptance(p: Law, q: Law) -> Fraction:
    """sum min(p, q): the chance that a draft from q stands."""
    return sum((min(a, b) for a, b in zip(p, q, strict=True)), Fraction(0))


def emitted(p: Law, q: Law, alpha: Fraction) -> Law:
    """Law of what a position emits; alpha 1 is the standard rule.

    min(p, q) + (1 - sum min(p, q)) * residual / sum of the residual. A pair without
    rejection never asks for a replacement: nothing is divided by its residual.
    """
    fell = 1 - mean_acceptance(p, q)
    replaced = shares(residual(p, q, alpha))
    pairs = zip(p, q, replaced, strict=True)
    return tuple(min(a, b) + fell * share for a, b, share in pairs)


def obeys_bounds(p: Law, out: Law, alpha: Fraction) -> bool:
    """P - eps / (1 + eps) <= A <= (1 + eps) P, with eps = 1 - alpha."""
    eps = 1 - alpha
    slack = eps / (1 + eps)
    pairs = zip(p, out, strict=True)
    return all(a - slack <= x <= (1 + eps) * a for a, x in pairs)


def grid_laws(parts: int, tokens: int = 3) -> list[Law]:
    """All laws whose weights are multiples of 1 / parts."""
    counts = itertools.product(range(parts + 1), repeat=tokens)
    return [
        tuple(Fraction(c, parts) for c in row) for row in counts if sum(row) == parts
    ]


def integer_law(p: Law, q: Law, alpha: Fraction | None, total: int) -> Law:
    """Law of the serving functions on integer rows, by trying every number.

    A unit of the penalised residual is hit by equally many 64-bit words as any other,
    to within one; one word stands for them here.

    Args:
      p: of the target; `total` times it must be integers.
      q: of the draft; likewise.
      alpha: None: the exact rule.
      total: units of a row, S.
    """
    target, draft = integer_row("target", p, total), integer_row("draft", q, total)
    count = 1 if alpha is None else _replacements(target, draft, alpha, total)
    # Draft points, and for each of them as many words as residuals have units.
    point, unit = np.indices((total, count)).reshape(2, -1)
    # The smallest 64-bit word that the unit's interval holds.
    words = [-(-int(k) * 2**64 // count) for k in unit]
    pairs = np.asarray([[w >> 32, w & 0xFFFFFFFF] for w in words], np.uint32)
    bent = None if alpha is None else float(alpha)
    rows = _judged(target, draft, point, pairs, bent, total)
    found = np.bincount(np.asarray(rows.token), minlength=len(p))
    return tuple(Fraction(int(n), len(point)) for n in found)


def _judged(
    p: list[int],
    q: list[int],
    points: np.ndarray,
    words: np.ndarray,
    alpha: float | None,
    total: int,
) -> pk.VerifiedRows:
    """Rows that draft by their points and are verified."""
    count = len(points)
    target, draft = (jnp.asarray(np.tile(row, (count, 1)), jnp.int32) for row in (p, q))
    point, pair = jnp.asarray(points, jnp.int32), jnp.asarray(words)
    return _verified(target, draft, point, pair, alpha=alpha, total=total)


@functools.partial(jax.jit, static_argnames=("alpha", "total"))
def _verified(
    target: jax.Array,
    draft: jax.Array,
    points: jax.Array,
    words: jax.Array,
    *,
    alpha: float | None,
    total: int,
) -> pk.VerifiedRows:
    ids, offsets = pk.draw(draft, points)
    verify, fresh = jnp.ones(points.shape, bool), jnp.zeros_like(points)
    args = (target, draft, ids, offsets, verify, fresh)
    if alpha is None:
        return pk.verify_rows(*args, total=total)
    return penalised.verify_rows(*args, words, alpha=alpha, total=total)


def integer_row(name: str, law: Law, total: int) -> list[int]:
    """A law in units of 1 / total."""
    units = [weight * total for weight in law]
    ok = all(unit.denominator == 1 for unit in units)
    require(ok, name, ",".join(map(str, law)), f"multiples of 1/{total}")
    return [int(unit) for unit in units]


def _replacements(p: list[int], q: list[int], alpha: Fraction, total: int) -> int:
    """Units of the residual, as the penalised rule rounds it."""
    nothing = np.zeros((1, 2), np.uint32)
    rows = _judged(p, q, nothing[:, 0], nothing, float(alpha), total)
    # The proxy is 1 less the residual's mass. Equal rows have none, and use none.
    return max(1, round((1 - float(rows.accept_prob[0])) * total))


def report(options: argparse.Namespace, show: Callable[[str], None]) -> None:
    """Shows every table."""
    p, q, alpha = options.target, options.draft, options.alpha
    names = [chr(ord("A") + i) for i in range(len(p))]
    standard, bent = emitted(p, q, Fraction(1)), emitted(p, q, alpha)

    def table(standard: Law, bent: Law) -> str:
        change = [b - a for a, b in zip(p, bent, strict=True)]
        rows = zip(names, p, q, standard, bent, change, strict=True)
        columns = ["token", "target", "draft", "standard", "penalised", "difference"]
        return markdown_table(columns, rows)

    show(table(standard, bent))
    show(f"standard equals the target: {standard == p}")
    show(f"penalised obeys both bounds: {obeys_bounds(p, bent, alpha)}")
    if p == q:
        show("no rejection: nothing is replaced, so that nothing is normalised")

    weights = residual(p, q, alpha)
    rows = zip(names, weights, shares(weights), strict=True)
    show(markdown_table(["token", "replacement weight", "share"], rows))

    beta, proxy = mean_acceptance(p, q), 1 - sum(weights, Fraction(0))
    show(f"mean acceptance of the standard test: {beta}")
    show(f"one minus the penalised residual mass: {proxy}")
    show(f"difference: {beta - proxy}")
    chance = [min(Fraction(1), a / b) if b else "-" for a, b in zip(p, q, strict=True)]
    rows = [[name, own, beta, proxy] for name, own in zip(names, chance, strict=True)]
    show(markdown_table(["draft", "its own chance", "mean", "logged proxy"], rows))
    sure = [name for name, own in zip(names, chance, strict=True) if own in (0, 1)]
    show(f"drafts whose own chance is 0 or 1: {', '.join(sure) or 'none'}")
    show(f"the mean is 1 only for equal laws, 0 only for disjoint ones: {beta}")
    show(f"the logged proxy never exceeds alpha = {alpha}: {proxy}")

    laws = grid_laws(options.grid)
    pairs = list(itertools.product(laws, laws))
    ok = [
        obeys_bounds(a, emitted(a, b, each), each)
        for each in options.grid_alphas
        for a, b in pairs
    ]
    show(f"bound checks on the grid: {len(ok)}, violations: {ok.count(False)}")
    eps = -math.expm1(-options.penalty)
    show(f"a penalty of {options.penalty:g} is epsilon {eps:.10f}")

    if options.integer is not None:
        total = options.integer
        exact = integer_law(p, q, None, total)
        show(f"\nserving functions on integer rows of total {total}:")
        show(table(exact, integer_law(p, q, alpha, total)))
        show(f"standard equals the target row: {exact == p}")
    if options.plot is not None:
        _draw(options.plot, names, p, q, standard, bent)


def _draw(path: Path, names: list[str], *laws: Law) -> None:
    figure = figure_class()(figsize=(5, 3))
    axes = figure.subplots()
    labels = ["target", "draft", "standard", "penalised"]
    for i, (label, law) in enumerate(zip(labels, laws, strict=True)):
        places = np.arange(len(names)) + 0.2 * (i - 1.5)
        axes.bar(places, [float(w) for w in law], 0.18, label=label)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("probability")
    axes.legend(fontsize=8)
    figure.tight_layout()
    save_figure(figure, path)


def law_of(text: str) -> Law:
    law = tuple(Fraction(part) for part in text.split(","))
    if min(law) < 0 or sum(law) != 1:
        raise argparse.ArgumentTypeError(f"{text}: weights >= 0 that sum to 1")
    return law


def _alphas(text: str) -> Law:
    return tuple(_alpha(part) for part in text.split(","))


def _alpha(text: str) -> Fraction:
    alpha = Fraction(text)
    if not 0 < alpha <= 1:
        raise argparse.ArgumentTypeError(f"{text}: a fraction in (0, 1]")
    return alpha


def main(
    arguments: Sequence[str] | None = None, show: Callable[[str], None] = print
) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    third = tuple(Fraction(n, 6) for n in (3, 2, 1))
    parser.add_argument("--target", type=law_of, default=third, help="1/2,1/3,1/6")
    draft = tuple(Fraction(n, 6) for n in (2, 3, 1))
    parser.add_argument("--draft", type=law_of, default=draft, help="1/3,1/2,1/6")
    parser.add_argument("--alpha", type=_alpha, default=Fraction(9, 10))
    parser.add_argument("--penalty", type=float, default=5e-5, help="-ln alpha")
    parser.add_argument("--grid", type=int, default=6, help="parts of the grid's laws")
    parser.add_argument(
        "--grid-alphas", type=_alphas, default=_alphas("1/2,9/10,99/100,999/1000")
    )
    parser.add_argument(
        "--integer",
        type=int,
        metavar="S",
        choices=range(1, LARGEST_TOTAL + 1),
        help=f"total of a row, at most {LARGEST_TOTAL}",
    )
    parser.add_argument("--plot", type=Path, help="picture of the first table")
    options = parser.parse_args(arguments)
    if len(options.target) != len(options.draft):
        parser.error("--target and --draft have different numbers of tokens")
    report(options, show)


if __name__ == "__main__":
    main()
