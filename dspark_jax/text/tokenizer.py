"""Text to token ids and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import tokenizers
from tokenizers.models import BPE

from dspark_jax.text.token_bytes import BYTE_ALPHABET, TokenBytes, token_bytes_rule


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer with the settings that generation needs from its files.

    backend: the `tokenizers` object that does the work.
    eos_ids: ids that end a turn or a text.
    special_tokens: template names (`bos_token`, `eos_token`, ...) to token text.
    chat_template: Jinja source, or None.
    """

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chat_template: str | None = None

    @property
    def size(self) -> int:
        """Number of tokens, added ones included. A model's vocabulary may be padded."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text, or None."""
        return self.token_id(self.special_tokens.get("bos_token", ""))

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text in the vocabulary, or None."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`.

        Special tokens spelled out in `text` are recognised always, as chat templates
        need it.

        Args:
            text: what to encode.
            special: add what the tokenizer adds by itself, such as a first BOS. False
                for text that has it already: a rendered chat, a continuation.

        Raises:
            ValueError: a character has no token. It would otherwise be dropped.
        """
        self._check_encodable(text)
        return self.backend.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`.

        Bytes that are not UTF-8 become U+FFFD, one for each maximal part of a
        character. Ids beyond the vocabulary, which padded models can emit, are empty.
        """
        data = b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids)
        text = data.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_space else text

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """UTF-8 bytes of one token, possibly a part of a character."""
        if skip_special and token_id in self._special_ids:
            return b""
        known = self._bytes_of.get(token_id)
        if known is None:
            token = self.backend.id_to_token(int(token_id))
            known = b"" if token is None else self._rule(token)
            self._bytes_of[token_id] = known
        return known

    @property
    def strips_space(self) -> bool:
        """Whether a decoded text loses one leading space."""
        return self._rule.strip_space

    @functools.cached_property
    def _rule(self) -> TokenBytes:
        return token_bytes_rule(self.backend)

    @functools.cached_property
    def _bytes_of(self) -> dict[int, bytes]:
        return {}

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @functools.cached_property
    def _present_bytes(self) -> bytes | None:
        """Bytes with a token of their own; None when nothing can be dropped.

        A byte-level BPE without an unknown token drops bytes that are in no token.
        """
        model = self.backend.model
        if not self._rule.byte_level or not isinstance(model, BPE):
            return None
        if model.unk_token is not None or model.byte_fallback:
            return None
        present = bytes(b for b in range(256) if self._has_byte(b))
        return None if len(present) == 256 else present

    def _has_byte(self, byte: int) -> bool:
        return self.token_id(BYTE_ALPHABET[byte]) is not None

    def _check_encodable(self, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds a lone surrogate {text[error.start]!r} at character "
                f"{error.start}; decode it properly or remove it"
            ) from None
        present = self._present_bytes
        if present is None or not data.translate(None, delete=present):
            return
        # The vocabulary covers normalised text, which is what the model sees.
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        for position, char in enumerate(text):
            if missing := char.encode().translate(None, delete=present):
                raise ValueError(
                    f"character {char!r} (U+{ord(char):04X}) at position {position} "
                    f"holds byte 0x{missing[0]:02x}, for which the tokenizer has no "
                    "token; remove it from the text"
                )
