"""Prompts of several sources, by domain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dspark_jax.config import require
from dspark_jax.evaluation.prompts import held_out
from dspark_jax.generate import Prompt
from dspark_jax.prompt_files import BUILTIN, read_prompts


def gather(
    sources: Sequence[str | Path], limit: int | None = None
) -> dict[str, list[Prompt]]:
    """Prompts of several sources, by domain.

    Args:
      sources: "builtin", the held-out prompts of this package, or JSON-lines files,
        see `dspark_jax.prompt_files`. A prompt without a domain belongs to the one
        named like its file.
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
        if str(source) == BUILTIN:
            for domain, prompts in held_out().items():
                found.setdefault(domain, []).extend(prompts)
            continue
        for one in read_prompts(source, builtin=True):
            domain = one.domain or Path(source).stem
            found.setdefault(domain, []).append(one.prompt)
    return {domain: prompts[:limit] for domain, prompts in found.items()}
