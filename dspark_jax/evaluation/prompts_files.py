"""Prompts from JSON-lines files, by the fields that public benchmarks use.

field                          benchmark
turns (the first is taken)     MT-Bench
question                       GSM8K
instruction (and input)        Alpaca
problem                        MATH
messages (up to the last user's)
prompt                         HumanEval
text
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.config import require
from dspark_jax.evaluation.prompts import held_out
from dspark_jax.generate import Prompt

FIELDS = (
    "turns",
    "question",
    "instruction",
    "problem",
    "messages",
    "prompt",
    "text",
)
BUILTIN = "builtin"


def gather(
    sources: Sequence[str | Path], limit: int | None = None
) -> dict[str, list[Prompt]]:
    """Prompts of several sources, by domain.

    Args:
      sources: "builtin", the held-out prompts of this package, or JSON-lines files.
      limit: at most this many of each domain, the first ones.

    Raises:
      ValueError: a file that is missing, empty, not JSON lines, or without a known
        field; a limit below 1.

    Example:
      >>> from dspark_jax.evaluation import gather
      >>> {domain: len(texts) for domain, texts in gather(["builtin"], 2).items()}
      {'repeat': 2, 'code': 2, 'prose': 2, 'math': 2, 'chat': 2}
    """
    require(limit is None or limit >= 1, "limit", limit, "None or an int >= 1")
    require(len(sources) > 0, "prompts", sources, "at least one source")
    found: dict[str, list[Prompt]] = {}
    for source in sources:
        part: Mapping[str, Sequence[Prompt]] = (
            held_out() if str(source) == BUILTIN else read_prompts(source)
        )
        for domain, prompts in part.items():
            found.setdefault(domain, []).extend(prompts)
    return {domain: prompts[:limit] for domain, prompts in found.items()}


def read_prompts(path: str | Path) -> dict[str, list[Prompt]]:
    """Prompts of one file, by `category`, or under the file's name without one.

    Args:
      path: one JSON object a line; empty lines are skipped.

    Raises:
      ValueError: see `gather`.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"`prompts` names {path}, which cannot be read ({error}); allowed: "
            f"{BUILTIN} or a file of JSON lines"
        ) from None
    found: dict[str, list[Prompt]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where} is no JSON object; write one object a line")
        domain = str(record.get("category") or path.stem)
        found.setdefault(domain, []).append(prompt_of(record, where))
    if not found:
        raise ValueError(f"{path} has no prompts; write one JSON object a line")
    return found


def prompt_of(record: Mapping[str, Any], where: str = "the record") -> Prompt:
    """The prompt of one record: the first of `FIELDS` that it has.

    Raises:
      ValueError: none of them, or one of another form than it should have.
    """
    name = next((field for field in FIELDS if record.get(field)), None)
    if name is None:
        raise ValueError(
            f"{where} has the fields {', '.join(sorted(record)) or '(none)'}; "
            f"understood are {', '.join(FIELDS)}, the first that is there and not empty"
        )
    value = record[name]
    if name == "turns" and isinstance(value, list):
        value = value[0]
    if name == "instruction" and record.get("input"):
        value = f"{value}\n\n{record['input']}"
    if name == "messages":
        return _conversation(value, where)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: `{name}` is {value!r}; it must be text")
    return value


def _conversation(messages: Any, where: str) -> Prompt:
    """Messages up to the user's last one; what follows was an answer to it."""
    good = isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("content"), str)
        for one in messages
    )
    if not good:
        raise ValueError(
            f"{where}: `messages` must be a list of objects with `role` and `content`"
        )
    asked = [i for i, one in enumerate(messages) if one.get("role") == "user"]
    if not asked:
        raise ValueError(f"{where}: `messages` has no message with the role user")
    return messages[: asked[-1] + 1]
