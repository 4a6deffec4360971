"""Reading a tokenizer from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from dspark_jax.errors import CheckpointError
from dspark_jax.text.gguf_tokenizer import tokenizer_from_gguf
from dspark_jax.text.tokenizer import Tokenizer

PUBLISHED = "tokenizer.json"
GGUF = "tokenizer_gguf.json"


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Reads the tokenizer of a published or a converted checkpoint.

    Args:
        folder: holds the files, itself or in its subfolder `tokenizer`: the published
            `tokenizer.json` with `tokenizer_config.json`, `generation_config.json`
            and `chat_template.jinja` where there are any, or `tokenizer_gguf.json`,
            the metadata of a GGUF file.

    Raises:
        CheckpointError: no tokenizer is there, or a file cannot be read.
        ValueError: the tokenizer is of a kind that is not supported.
    """
    folder = Path(folder)
    for place in (folder, folder / "tokenizer"):
        if (place / PUBLISHED).is_file():
            return _published(place)
        if (place / GGUF).is_file():
            return tokenizer_from_gguf(_json(place / GGUF))
    raise CheckpointError(
        f"no tokenizer in {folder}; wanted: {PUBLISHED} or {GGUF}, there or in its "
        "subfolder tokenizer/"
    )


def _published(folder: Path) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / PUBLISHED))
    except Exception as error:  # The library raises nothing narrower.
        raise CheckpointError(f"cannot read {folder / PUBLISHED}: {error}") from error
    # Files carry the settings of their training; a prompt is never cut or filled up.
    backend.no_truncation()
    backend.no_padding()
    config = _json(folder / "tokenizer_config.json")
    special = _special_tokens(config)
    tokenizer = Tokenizer(
        backend=backend,
        eos_ids=_eos_ids(folder, backend, special),
        special_tokens=special,
        chat_template=_chat_template(folder, config),
    )
    # Decoders of an unknown kind are found here, not in the middle of a stream.
    _ = tokenizer.strips_space
    return tokenizer


def _json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; nothing if there is no such file."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like; a token may be written as a dict with its flags."""
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token") and isinstance(value, str | dict):
            tokens[name] = value if isinstance(value, str) else value["content"]
    return tokens


def _eos_ids(
    folder: Path, backend: tokenizers.Tokenizer, special: dict[str, str]
) -> tuple[int, ...]:
    """What ends generation: the generation config decides where it speaks.

    The model config is the last resort, since it is seldom kept up to date.
    """
    value = _json(folder / "generation_config.json").get("eos_token_id")
    if value is None and "eos_token" in special:
        value = backend.token_to_id(special["eos_token"])
    if value is None:
        value = _json(folder / "config.json").get("eos_token_id", [])
    return tuple(value) if isinstance(value, list) else (int(value),)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template
