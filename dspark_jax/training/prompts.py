"""Prompts to train on: those of a file, and a set that is written out of templates.

The templates lie in `prompts.json`, by domain, each with the name of its family. Their
families are other ones than those of the held-out prompts in
`dspark_jax.evaluation`, so that what is measured there is not what was trained on.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.generate import Prompt

DOMAINS = ("repeat", "code", "prose", "math", "chat")
# A slot: a word of a list, `{name}`, `{name2}`, `{name*4}`; or a number, `{2-99}`.
SLOT = re.compile(r"\{(?:([a-z]+)(\d?)(?:\*(\d+))?|(\d+)-(\d+)[a-z]?)\}")
ARTICLE = re.compile(r"\b([Aa]) (?=[aeioAEIO])")


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt and where it belongs.

    Attributes:
      content: text, or a conversation whose last turn is not the assistant's.
      domain: a name, or None.
    """

    content: Prompt
    domain: str | None = None


def read_prompts(path: str | Path) -> list[TrainingPrompt]:
    """Reads JSON lines: objects with `prompt` or `messages`, and maybe `domain`.

        {"prompt": "What is a comet?", "domain": "chat"}
        {"messages": [{"role": "system", "content": "..."}, ...]}

    Other keys are ignored, and so are empty lines.

    Raises:
      ValueError: a file or line that is not in this form; names both.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                prompts.append(_prompt(json.loads(line)))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def builtin_prompts(count: int, seed: int = 0) -> list[TrainingPrompt]:
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
        prompts.append(TrainingPrompt(text, domain))
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


def _prompt(line: Any) -> TrainingPrompt:
    if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
        raise ValueError("wanted: an object with either `prompt` or `messages`")
    domain = line.get("domain")
    if domain is not None and not isinstance(domain, str):
        raise ValueError(f"`domain` is {domain!r}; allowed: a string")
    if "prompt" in line:
        text = line["prompt"]
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"`prompt` is {text!r}; allowed: a string, not empty")
        return TrainingPrompt(text, domain)
    turns = line["messages"]
    if not isinstance(turns, list) or not turns:
        raise ValueError("`messages` must be a list, not empty")
    if not all(isinstance(turn, dict) and "role" in turn for turn in turns):
        raise ValueError('`messages` must be a list of {"role", "content"} objects')
    if turns[-1]["role"] == "assistant":
        raise ValueError(
            "`messages` ends with the assistant; nothing is left to answer"
        )
    return TrainingPrompt(turns, domain)
