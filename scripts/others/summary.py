"""The order of turns and the figures of a comparison: pure functions."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Turn:
    """One prompt decoded one way.

    `seconds` run from the delivery of the first tokens, `first` of them (one, more
    where a library drafts from the prompt at once), to the delivery of the last.
    """

    domain: str
    tokens: tuple[int, ...]
    first: int
    seconds: float


def rotated(ways, turn):
    """`ways` in the order of a turn: in as many turns each has every place once."""
    start = turn % len(ways)
    return [*ways[start:], *ways[:start]]


def until_stop(tokens, stop_ids, limit):
    """At most `limit` tokens, cut behind the first stop token."""
    tokens = list(tokens)[:limit]
    for place, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: place + 1]
    return tokens


def rate(turns):
    """Tokens a second, added before they are divided; None without any."""
    timed = [turn for turn in turns if len(turn.tokens) > turn.first]
    seconds = sum(turn.seconds for turn in timed)
    tokens = sum(len(turn.tokens) - turn.first for turn in timed)
    return tokens / seconds if seconds else None


def figures(turns, base):
    """Figures of one way beside those of the way it is compared with.

    Args:
      turns: a `Turn` a prompt.
      base: those of the other way, in the same order of prompts.
    """
    mine, other = rate(turns), rate(base)
    same = sum(a.tokens == b.tokens for a, b in zip(turns, base, strict=True))
    domains = dict.fromkeys(turn.domain for turn in turns)
    return {
        "tokens_per_second": mine,
        "ratio": mine / other if mine and other else None,
        "prompts": len(turns),
        "same_tokens": same,
        "tokens": sum(len(turn.tokens) for turn in turns),
        "domains": {d: rate([t for t in turns if t.domain == d]) for d in domains},
    }
