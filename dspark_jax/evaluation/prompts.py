"""The held-out prompt set, and random prompts.

The held-out prompts come from families that no training prompt of the shipped
drafts uses: no counting, no sums of two numbers, no months, no "write a function
that ..." from a list of tasks.
"""

from __future__ import annotations

import json
from importlib import resources

import numpy as np

from dspark_jax.text import Tokenizer

DOMAINS = ("repeat", "code", "prose", "math", "chat")


def held_out(count: int | None = None) -> dict[str, list[str]]:
    """The first `count` prompts of every domain; None: all of them.

    `repeat` asks for given material again, in another form.

    Raises:
      ValueError: a count out of range.

    Example:
      >>> from dspark_jax.evaluation import held_out
      >>> sorted(held_out(2))
      ['chat', 'code', 'math', 'prose', 'repeat']
    """
    file = resources.files("dspark_jax.evaluation") / "prompts.json"
    prompts = json.loads(file.read_text(encoding="utf-8"))
    most = min(len(prompts[domain]) for domain in DOMAINS)
    if count is None:
        count = most
    if not 1 <= count <= most:
        raise ValueError(f"`prompts` is {count}; allowed: 1..{most} a domain")
    return {domain: prompts[domain][:count] for domain in DOMAINS}


def random_prompts(
    tokenizer: Tokenizer, count: int, *, tokens: int = 48, seed: int = 0
) -> list[str]:
    """Texts of random tokens, to time programs with.

    What a model says to them, and how much of it a draft guesses, means nothing.

    Args:
      tokenizer: whose tokens; only those of printable ASCII are used, so that the
        text can be encoded again.
      count: prompts.
      tokens: tokens drawn for each; encoding the text again may give fewer.
      seed: of the draw.
    """
    pieces = [tokenizer.decode([i]) for i in range(tokenizer.size)]
    usable = [p for p in pieces if p and p.isascii() and p.isprintable()]
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(usable), size=(count, tokens))
    return ["".join(usable[i] for i in row) for row in drawn]
