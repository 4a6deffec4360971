"""What follows from the published speeds of the online gate, and what does not.

Exact arithmetic on printed numbers. Where a printed number cannot be reached from the
others by the rule beside it, the table says so.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from fractions import Fraction

from dspark_jax.tables import markdown_table

Numbers = tuple[Fraction, ...]

_ZERO = Fraction(0)


def speed(accepted: Fraction, round_ms: Fraction) -> Fraction:
    """Tokens a second of rounds that accept so many drafts on average."""
    return 1000 * (1 + accepted) / round_ms


def pooled(accepted: Numbers, rounds: Numbers, round_ms: Fraction) -> Fraction:
    """Tokens a second over all prompts: all tokens by all time."""
    tokens = sum(((1 + a) * r for a, r in zip(accepted, rounds, strict=True)), _ZERO)
    return 1000 * tokens / (sum(rounds, _ZERO) * round_ms)


def harmonic_by_rounds(speeds: Numbers, rounds: Numbers) -> Fraction:
    """Harmonic mean of prompts' speeds, weighted by their rounds.

    It is the pooled speed of a run in which all rounds emit equally many tokens, which
    rounds of different prompts do not.
    """
    times = sum((r / s for r, s in zip(rounds, speeds, strict=True)), _ZERO)
    return sum(rounds, _ZERO) / times


def recovered(plain: Fraction, always: Fraction, gated: Fraction) -> Fraction:
    """Share of the gap between always drafting and plain, in time a token."""
    return (1 / always - 1 / gated) / (1 / always - 1 / plain)


def ceiling(options: argparse.Namespace, accepted: Fraction) -> Fraction:
    """Speed of a policy that knows what will be accepted and verifies just that.

    Every round pays for its draft, and verifies a drafts in base + slope * a or takes a
    plain step. No policy that drafts in every round is faster.
    """
    draft, base, slope, plain = (
        Fraction(str(ms))
        for ms in (
            options.draft_ms,
            options.verify_base_ms,
            options.verify_slope_ms,
            options.plain_ms,
        )
    )
    return speed(accepted, draft + min(base, plain) + slope * accepted)


def rounds_that_fit(
    accepted: Numbers, total: int, matches: int
) -> list[tuple[int, ...]]:
    """All splits of `total` rounds for which the means give whole counts.

    Args:
      accepted: mean accepted drafts of each prompt.
      total: rounds of all prompts.
      matches: accepted drafts of all prompts.
    """
    choices = [range(a.denominator, total + 1, a.denominator) for a in accepted]
    return [
        split
        for split in itertools.product(*choices)
        if sum(split) == total
        and sum(a * r for a, r in zip(accepted, split, strict=True)) == matches
    ]


def report(options: argparse.Namespace, show: Callable[[str], None]) -> None:
    """Shows the reported tables and the checks."""
    plain_ms = Fraction(str(options.plain_ms))
    plain = 1000 / plain_ms
    drafts = options.block
    full_ms = sum(
        (
            Fraction(str(options.draft_ms)),
            Fraction(str(options.verify_base_ms)),
            drafts * Fraction(str(options.verify_slope_ms)),
        ),
        _ZERO,
    )
    always = tuple(speed(a, full_ms) for a in options.accepted)
    show(f"reported, tokens/s (plain {_two(plain)}, a whole block {full_ms} ms):\n")
    columns = ["prompt", "accepted", "always", "gated", "live always", "live gated"]
    rows = zip(
        options.prompts,
        options.accepted,
        map(_two, always),
        map(_two, options.gated),
        map(_two, options.live_always),
        map(_two, options.live_gated),
        strict=True,
    )
    show(markdown_table(columns, rows))

    show("\nleave one out, with a threshold on the confidence:\n")
    ratios = [t / a for t, a in zip(options.thresholded, always, strict=True)]
    rows = [
        [name, _two(a), _two(t), "yes" if t > max(a, plain) else "no"]
        for name, a, t in zip(options.prompts, always, options.thresholded, strict=True)
    ]
    columns = ["prompt", "always", "thresholded", "above plain and always"]
    show(markdown_table(columns, rows))
    show(f"mean ratio {_two(sum(ratios, _ZERO) / len(ratios))}")
    show("\nwhat follows:\n")
    show(
        markdown_table(
            ["statement", "reported", "recomputed", "holds"],
            _checks(options, plain, always, full_ms),
        )
    )


def _checks(
    options: argparse.Namespace, plain: Fraction, always: Numbers, full_ms: Fraction
) -> list[list[str]]:
    """Statement, reported, recomputed, verdict."""
    rounds = options.rounds
    count = int(sum(rounds))
    matches = int(sum(a * r for a, r in zip(options.accepted, rounds, strict=True)))
    fits = rounds_that_fit(options.accepted, count, matches)
    rows = [
        _row(
            f"{count} rounds, {matches} matches",
            ", ".join(map(str, rounds)),
            "; ".join(", ".join(map(str, split)) for split in fits),
        ),
    ]
    for name, got, printed in zip(options.prompts, always, options.always, strict=True):
        rows.append(_row(f"{name}, always", _two(printed), _two(got)))
    overall, gated = options.overall
    rows += [
        _row(
            "overall always, harmonic by rounds",
            _two(overall),
            _two(harmonic_by_rounds(always, rounds)),
        ),
        _row(
            "overall always, tokens by time",
            _two(overall),
            _two(pooled(options.accepted, rounds, full_ms)),
        ),
        _row(
            "overall gated, harmonic by rounds",
            _two(gated),
            _two(harmonic_by_rounds(options.gated, rounds)),
        ),
    ]
    lost = options.zero_rounds * (full_ms - 1000 / plain)
    rows.append(
        _row(
            f"{options.zero_rounds} rounds without a match, share of the time",
            _percent(options.zero_share),
            _percent(lost / (count * full_ms)),
        )
    )
    printed_plain = Fraction(_two(plain))
    for name, share in zip(options.gap_prompts, options.gap, strict=True):
        i = options.prompts.index(name)
        got = recovered(printed_plain, options.always[i], options.gated[i])
        rows.append(_row(f"{name}, recovered gap", _percent(share), _percent(got)))
    for label, before, after in (
        ("replay", options.always, options.gated),
        ("live", options.live_always, options.live_gated),
    ):
        worst = min(b / a for a, b in zip(before, after, strict=True))
        # Two digits of a speed are worth about half a percent.
        verdict = "no prompt" if worst > Fraction(99, 100) else f"{_two(worst)}x"
        rows.append(_row(f"{label}: which prompt gets slower", "no prompt", verdict))
    for name, a, t in zip(
        options.prompts, options.accepted, options.thresholded, strict=True
    ):
        most = ceiling(options, a)
        row = [f"{name}, thresholded, if skips pay", _two(t), f"at most {_two(most)}"]
        rows.append([*row, "yes" if t <= most else "no"])
    for name, a, b in zip(
        options.prompts, options.always, options.live_always, strict=True
    ):
        if (a > plain) != (b > plain):
            easy = ["yes" if x > plain else "no" for x in (a, b)]
            rows.append(_row(f"{name}, always beats plain: replay, live", *easy))
    return rows


def _row(statement: str, reported: str, recomputed: str) -> list[str]:
    return [statement, reported, recomputed, "yes" if reported == recomputed else "no"]


def numbers(text: str) -> tuple[float, ...]:
    """Numbers from an argument, fractions as 1/2."""
    return tuple(float(Fraction(part)) for part in text.split(","))


def fractions(text: str) -> Numbers:
    """Exact numbers from an argument."""
    return tuple(Fraction(part) for part in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The reported numbers, by prompt."""
    group = parser.add_argument_group("reported numbers, by prompt")

    def add(name: str, default: str, kind: Callable = fractions) -> None:
        group.add_argument(f"--{name}", type=kind, default=kind(default), help=default)

    add("prompts", "repeat,code,prose,math", _words)
    add("rounds", "8,8,7,8")
    add("accepted", "5,33/8,2,7/8")
    add("always", "5.76,4.92,2.88,1.80")
    add("gated", "5.76,4.92,3.05,2.45")
    add("live-always", "4.44,2.77,3.22,3.15")
    add("live-gated", "4.41,3.62,3.06,4.15")
    add("thresholded", "5.62,4.31,3.59,3.40")
    add("overall", "3.14,3.62")
    add("zero-rounds", "7", int)
    add("zero-share", "16/100", Fraction)
    add("gap-prompts", "prose,math", _words)
    add("gap", "44/100,72/100")
    add("block", "5", int)


def _two(x: Fraction) -> str:
    return f"{float(x):.2f}"


def _percent(x: Fraction) -> str:
    return f"{float(x):.0%}"
