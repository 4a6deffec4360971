"""Prompts to train on, written out of templates.

The templates lie in `prompts.json`, by domain, each with the name of its family. Their
families are other ones than those of the held-out prompts in
`dspark_jax.evaluation`, so that what is measured there is not what was trained on.
"""

from __future__ import annotations

import functools
import json
import re
from importlib import resources
from typing import Any

import numpy as np

from dspark_jax.prompt_files import PromptRecord

DOMAINS = ("repeat", "code", "prose", "math", "chat")
# A slot: a word of a list, `{name}`, `{name2}`, `{name*4}`; or a number, `{2-99}`.
SLOT = re.compile(r"\{(?:([a-z]+)(\d?)(?:\*(\d+))?|(\d+)-(\d+)[a-z]?)\}")
ARTICLE = re.compile(r"\b([Aa]) (?=[aeioAEIO])")


def builtin_prompts(count: int, seed: int = 0) -> list[PromptRecord]:
    """The first `count` prompts out of the templates, all different.

    Domains take turns, and so do the templates of a domain.

    Raises:
      ValueError: more than the templates give.

    Example:
      >>> [prompt.domain for prompt in builtin_prompts(6)]
      ['repeat', 'code', 'prose', 'math', 'chat', 'repeat']
    """
    rng = np.random.default_rng(seed)
    order = {
        domain: [one[i] for i in rng.permutation(len(one))]
        for domain, one in templates().items()
    }
    at = dict.fromkeys(DOMAINS, 0)
    seen: set[str] = set()
    prompts = []
    for number in range(count):
        domain = DOMAINS[number % len(DOMAINS)]
        # Templates with few words run out earlier than others.
        for _ in range(3 * len(order[domain])):
            _, template = order[domain][at[domain] % len(order[domain])]
            at[domain] += 1
            text = _fill(template, rng)
            if text not in seen:
                break
        else:
            raise ValueError(
                f"`count` is {count}; the templates give {number} prompts or few more"
            )
        seen.add(text)
        prompts.append(PromptRecord(text, domain))
    return prompts


def templates() -> dict[str, list[tuple[str, str]]]:
    """(family, template) pairs by domain."""
    found = _file()["templates"]
    return {domain: [tuple(pair) for pair in found[domain]] for domain in DOMAINS}


@functools.cache
def _file() -> dict[str, Any]:
    file = resources.files("dspark_jax.training") / "prompts.json"
    return json.loads(file.read_text(encoding="utf-8"))


def _fill(template: str, rng: np.random.Generator) -> str:
    """The template with its slots filled.

    The same slot has the same value everywhere, and no two slots of a list the same
    word.
    """
    words, drawn = _file()["words"], {}
    left: dict[str, list[str]] = {}

    def value(slot: re.Match[str]) -> str:
        if slot[0] not in drawn:
            drawn[slot[0]] = draw(*slot.groups())
        return drawn[slot[0]]

    def draw(
        name: str | None, _: str, times: str | None, low: str | None, high: str | None
    ) -> str:
        if name is None or low is not None and high is not None:
            return str(rng.integers(int(low or 0), int(high or 0) + 1))
        if name not in left:
            left[name] = [words[name][i] for i in rng.permutation(len(words[name]))]
        return ", ".join(left[name].pop() for _ in range(int(times or 1)))

    return ARTICLE.sub(r"\1n ", SLOT.sub(value, template))
