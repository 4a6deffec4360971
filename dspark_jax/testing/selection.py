"""Exact laws of a length policy and a sampler together, in fractions.

A round drafts n tokens, a policy picks how many of them are verified, and the round
emits those that stand and one more. Where the pick depends on a token that it decides
about, the emitted law is not the target's, however right the acceptance rule is. Small
models show it: all drafts are enumerated with their weights, and what follows from each
of them is a law of its own.

The context in front of the round is fixed; a `prefix` is what the round has drafted or
emitted so far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from fractions import Fraction

Prefix = tuple[int, ...]
Row = tuple[Fraction, ...]
# From the confidences of a block, draft 1 first, to how many drafts are verified.
Policy = Callable[[tuple[Fraction, ...]], int]
# From (committed length, draft of the round from 0) to what names a draw.
DrawKey = Callable[[int, int], Hashable]


@dataclass(frozen=True)
class SmallModel:
    """A target and a draft that are functions of a prefix.

    Attributes:
      target: the target's row behind a prefix.
      draft: the draft's row behind a prefix.
      confidence: of the draft that comes behind a prefix; made before it is drawn.
      drafts: n, of a round.
    """

    target: Callable[[Prefix], Row]
    draft: Callable[[Prefix], Row]
    confidence: Callable[[Prefix], Fraction]
    drafts: int

    def confidences(self, drafted: Prefix) -> tuple[Fraction, ...]:
        """c_1..c_n of a drafted block; c_j is a function of drafts 1..j-1."""
        return tuple(self.confidence(drafted[:j]) for j in range(self.drafts))


def emitted_law(model: SmallModel, policy: Policy, tokens: int) -> dict[Prefix, Row]:
    """Law of the first tokens, when each round's policy sees that round's block.

    Args:
      model: see there.
      policy: gets all confidences of the block; a policy that may be used for draft j
        with c_1..c_j only has to restrict itself.
      tokens: how many; what the round does not emit follows from the target.

    Returns:
      The tokens to a pair (emitted, target), both weights of a law.
    """
    law: dict[Prefix, Fraction] = {}
    for drafted, weight in _blocks(model):
        length = policy(model.confidences(drafted))
        _add(law, _emissions(model, drafted, length, tokens), weight)
    return _beside_target(model, law, tokens)


def lagged_law(
    model: SmallModel, policy: Policy, tokens: int, key: DrawKey, emitted: int = 1
) -> dict[Prefix, Row]:
    """Law of a round whose length comes from the confidences of the round before.

    The round before drafted a block from committed length 0 and emitted `emitted`
    tokens, which had nothing to do with the drafts behind them; this round drafts from
    there. Draws of one key are one draw. Both rounds see the context as fixed.

    Args:
      model: see there; the draft's weights must be multiples of one fraction.
      policy: gets the confidences of the *older* block.
      tokens: see `emitted_law`.
      key: names of the draws, see `DrawKey`.
      emitted: by the round before.

    Returns:
      See `emitted_law`.
    """
    steps = range(model.drafts)
    older = [key(0, step) for step in steps]
    newer = [key(emitted, step) for step in steps]
    names = list(dict.fromkeys([*older, *newer]))
    points = _points(model)
    law: dict[Prefix, Fraction] = {}
    weight = Fraction(1, points ** len(names))
    for drawn in itertools.product(range(points), repeat=len(names)):
        draw = dict(zip(names, drawn, strict=True))
        old = _drafted(model, [draw[name] for name in older], points)
        new = _drafted(model, [draw[name] for name in newer], points)
        length = policy(model.confidences(old))
        _add(law, _emissions(model, new, length, tokens), weight)
    return _beside_target(model, law, tokens)


def is_lossless(law: dict[Prefix, Row]) -> bool:
    """Whether every weight equals the target's."""
    return all(emitted == target for emitted, target in law.values())


def foresight(
    policy: Policy, blocks: list[tuple[Fraction, ...]]
) -> tuple[int, tuple[Fraction, ...], tuple[Fraction, ...]] | None:
    """A draft that is in or out for what later confidences say.

    Returns:
      (j, block, other): two blocks with the same c_1..c_j, in one of which draft j is
      verified; None where there are none.
    """
    taken: dict[tuple[Fraction, ...], tuple[bool, tuple[Fraction, ...]]] = {}
    for block in blocks:
        length = policy(block)
        for j in range(1, len(block) + 1):
            before, other = taken.setdefault(block[:j], (length >= j, block))
            if before != (length >= j):
                return j, block, other
    return None


def _blocks(model: SmallModel) -> Iterator[tuple[Prefix, Fraction]]:
    """All blocks of drafts with their weights."""
    size = len(model.draft(()))
    for drafted in itertools.product(range(size), repeat=model.drafts):
        weight = Fraction(1)
        for j, token in enumerate(drafted):
            weight *= model.draft(drafted[:j])[token]
        if weight:
            yield drafted, weight


def _emissions(
    model: SmallModel, drafted: Prefix, length: int, tokens: int
) -> dict[Prefix, Fraction]:
    """Law of the first tokens, given the drafts and how many are verified."""
    law: dict[Prefix, Fraction] = {}
    reached = Fraction(1)
    for j in range(min(length, tokens)):
        prefix, x = drafted[:j], drafted[j]
        p, q = model.target(prefix), model.draft(prefix)
        accept = min(Fraction(1), p[x] / q[x])
        residual = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
        fell = reached * (1 - accept)
        for y, extra in enumerate(residual):
            if fell and extra:
                weight = fell * extra / sum(residual)
                _add(law, _followed(model, (*prefix, y), tokens), weight)
        reached *= accept
    stood = drafted[: min(length, tokens)]
    _add(law, _followed(model, stood, tokens), reached)
    return law


def _followed(model: SmallModel, start: Prefix, tokens: int) -> dict[Prefix, Fraction]:
    """Law of `tokens` tokens that begin with `start` and go on with the target."""
    law = {start: Fraction(1)}
    for _ in range(tokens - len(start)):
        law = {
            (*prefix, y): weight * chance
            for prefix, weight in law.items()
            for y, chance in enumerate(model.target(prefix))
        }
    return law


def _points(model: SmallModel) -> int:
    """Into how many equal parts a draw falls."""
    size = len(model.draft(()))
    denominators = {1}
    for depth in range(model.drafts):
        for prefix in itertools.product(range(size), repeat=depth):
            denominators |= {weight.denominator for weight in model.draft(prefix)}
    return math.lcm(*denominators)


def _drafted(model: SmallModel, drawn: list[int], points: int) -> Prefix:
    """The block that these points draw, tokens ascending along the unit interval."""
    block: Prefix = ()
    for point in drawn:
        ends = itertools.accumulate(weight * points for weight in model.draft(block))
        block = (*block, sum(end <= point for end in ends))
    return block


def _add(
    law: dict[Prefix, Fraction], more: dict[Prefix, Fraction], weight: Fraction
) -> None:
    for tokens, chance in more.items():
        law[tokens] = law.get(tokens, Fraction(0)) + weight * chance


def _beside_target(
    model: SmallModel, law: dict[Prefix, Fraction], tokens: int
) -> dict[Prefix, Row]:
    wanted = _followed(model, (), tokens)
    if set(law) - set(wanted):
        raise AssertionError(f"emitted {set(law) - set(wanted)}")
    return {key: (law.get(key, Fraction(0)), wanted[key]) for key in wanted}
