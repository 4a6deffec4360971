"""Prompts of JSON-lines files, by the fields that public benchmarks use.

    {"prompt": "What is a comet?", "domain": "chat"}
    {"messages": [{"role": "user", "content": "Hello?"}]}

The prompt is in the first of these fields that a line has; null and "" are none:

field                          benchmark
turns (the first is taken)     MT-Bench
question                       GSM8K
instruction (and input)        Alpaca
problem                        MATH
messages (up to the last user's)
prompt                         HumanEval
text

`domain` says where a prompt belongs, else `category`, by the same rule. Other fields
are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

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
DOMAIN_FIELDS = ("domain", "category")
# Names the prompts of the package where it has some for the purpose.
BUILTIN = "builtin"


@dataclass(frozen=True)
class PromptRecord:
    """A prompt and where it belongs.

    Attributes:
      prompt: text, or a conversation whose last turn is the user's.
      domain: a name, or None.
    """

    prompt: Prompt
    domain: str | None = None


def read_prompts(path: str | Path, *, builtin: bool = False) -> list[PromptRecord]:
    """Reads one JSON object a line; empty lines are skipped.

    A conversation is cut after its last turn of the user: what follows was an answer.

    Args:
      path: a text file in UTF-8.
      builtin: whether `builtin` could be given instead; only said in an error.

    Raises:
      ValueError: a file that cannot be read or has no prompts; a line that is not in
        this form, with its number.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        others = f"{BUILTIN} or " if builtin else ""
        raise ValueError(
            f"`prompts` names {path}, which cannot be read ({error}); allowed: "
            f"{others}a file of JSON lines"
        ) from error
    records = []
    # Not `splitlines`: JSON may have U+2028 and the like inside a string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append(_record(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not records:
        raise ValueError(f"{path} has no prompts; allowed: one JSON object a line")
    return records


def _record(line: str) -> PromptRecord:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{short(line)} is not JSON ({error}); allowed: one object a line"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{short(found)} is no object; allowed: one object a line")
    return PromptRecord(_prompt(found), _domain(found))


def _prompt(record: Mapping[str, Any]) -> Prompt:
    name = next((field for field in FIELDS if _has(record, field)), None)
    if name is None:
        raise ValueError(
            f"the fields are {', '.join(sorted(record)) or '(none)'}; allowed: one of "
            f"{', '.join(FIELDS)}, not empty"
        )
    value = record[name]
    if name == "messages":
        return _conversation(value)
    if name == "turns" and isinstance(value, list) and value:
        value = value[0]
    _require_text(name, value)
    if name == "instruction" and _has(record, "input"):
        _require_text("input", record["input"])
        value = f"{value}\n\n{record['input']}"
    return value


def _domain(record: Mapping[str, Any]) -> str | None:
    name = next((field for field in DOMAIN_FIELDS if _has(record, field)), None)
    if name is None:
        return None
    value = record[name]
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is {short(value)}; allowed: a string")
    return value


def _has(record: Mapping[str, Any], field: str) -> bool:
    return record.get(field) not in (None, "")


def _require_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"`{name}` is {short(value)}; allowed: text, not empty")


def _conversation(messages: Any) -> Prompt:
    """Messages up to the user's last one."""
    good = (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(one, dict)
            and isinstance(one.get("role"), str)
            and isinstance(one.get("content"), str)
            for one in messages
        )
    )
    if not good:
        raise ValueError(
            f"`messages` is {short(messages)}; allowed: a list, not empty, of "
            '{"role", "content"} objects with strings'
        )
    asked = [i for i, one in enumerate(messages) if one["role"] == "user"]
    if not asked:
        roles = ", ".join(one["role"] for one in messages)
        raise ValueError(
            f"`messages` has the roles {roles}; allowed: one of them the role user"
        )
    return messages[: asked[-1] + 1]
