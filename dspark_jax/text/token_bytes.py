"""The bytes a token stands for, read off a tokenizer's decoder.

Bytes, unlike decoded strings, can be joined token by token: text is then the UTF-8
reading of one byte sequence, however it was cut into pieces.
"""

from __future__ import annotations

import dataclasses
import json
import re

import tokenizers

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> tuple[str, ...]:
    """The character that byte-level BPE writes for each byte.

    Bytes that print keep their own character; the others take, in order, the
    characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(b if b in printable else next(others)) for b in range(256))


BYTE_ALPHABET = _byte_alphabet()
_BYTE_OF = {char: byte for byte, char in enumerate(BYTE_ALPHABET)}


@dataclasses.dataclass(frozen=True)
class TokenBytes:
    """How tokens become bytes.

    byte_level: characters are bytes in the byte-level alphabet.
    byte_fallback: tokens written `<0x0A>` are that byte.
    replacements: (written, meant) pairs, applied in order.
    strip_space: the text as a whole loses one leading space, which the tokenizer
        put there when it encoded.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_space: bool = False

    def __call__(self, token: str) -> bytes:
        """The bytes of `token`, as it stands in the vocabulary."""
        for written, meant in self.replacements:
            token = token.replace(written, meant)
        if self.byte_level and all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        if self.byte_fallback and (match := _FALLBACK.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


def token_bytes_rule(backend: tokenizers.Tokenizer) -> TokenBytes:
    """Reads the rule from the decoder of `backend`.

    Raises:
        ValueError: the decoder has a step whose effect on single tokens is not known.
    """
    rule = TokenBytes()
    for step in _steps(backend):
        rule = _with_step(rule, step)
    return rule


def _steps(backend: tokenizers.Tokenizer) -> list[dict]:
    if backend.decoder is None:
        raise ValueError(
            "the tokenizer has no decoder; supported are byte-level BPE and "
            "SentencePiece-style BPE with their decoders in tokenizer.json"
        )
    state = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _with_step(rule: TokenBytes, step: dict) -> TokenBytes:
    match step:
        case {"type": "ByteLevel"}:
            return dataclasses.replace(rule, byte_level=True)
        case {"type": "ByteFallback"}:
            return dataclasses.replace(rule, byte_fallback=True)
        case {"type": "Fuse"}:
            return rule
        case {"type": "Replace", "pattern": {"String": written}, "content": meant}:
            pairs = (*rule.replacements, (written, meant))
            return dataclasses.replace(rule, replacements=pairs)
        case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
            return dataclasses.replace(rule, strip_space=start == 1)
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            return dataclasses.replace(
                rule,
                replacements=(*rule.replacements, (mark, " ")),
                strip_space=scheme != "never",
            )
    raise ValueError(
        f"the tokenizer's decoder step {step} is not supported; supported are "
        "ByteLevel, ByteFallback, Fuse, Replace of a string, Strip of one leading "
        "space and Metaspace"
    )
