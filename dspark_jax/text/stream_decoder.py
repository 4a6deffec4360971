"""Token ids to text, piece by piece."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from dspark_jax.text.tokenizer import Tokenizer


class StreamDecoder:
    """Turns ids into text as they arrive, in time linear in their number.

    A character whose bytes are spread over tokens comes out whole, with its last
    token. The pieces joined are exactly `Tokenizer.decode` of all ids, however the
    ids were split over calls.

    Args:
        tokenizer: whose ids they are.
        skip_special: leave special tokens out of the text.
        continued: the ids continue a text, so that a leading space is part of it.

    Example:
        >>> from dspark_jax.text import StreamDecoder, Tokenizer
        >>> def show(tokenizer: Tokenizer, rounds: list[list[int]]) -> None:
        ...     decoder = StreamDecoder(tokenizer)
        ...     for ids in rounds:
        ...         print(decoder.feed(ids), end="")
        ...     print(decoder.flush())
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        continued: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._strip = tokenizer.strips_space and not continued
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The characters that `ids` finish; possibly none."""
        skip = self._skip_special
        token_bytes = self._tokenizer.token_bytes
        data = b"".join(token_bytes(i, skip_special=skip) for i in ids)
        return self._stripped(self._utf8.decode(data))

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD, once."""
        text = self._stripped(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        return text

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
