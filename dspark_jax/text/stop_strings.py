"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class StopMatch:
    """Where generation ends.

    stop: the stop string that was found.
    text_length: characters of text before it; the text ends there.
    tokens: tokens kept, that is through the one that completed the stop string.
        Continuing from them is continuing from a text that ends with it.
    """

    stop: str
    text_length: int
    tokens: int


class StopMatcher:
    """Releases text up to the first stop string.

    Call `feed` once per token, with the text that the token finished (often a word,
    sometimes nothing): the count of calls is the count of tokens. The result does not
    depend on how the text is cut: of several stop strings the one completed first
    counts, and of those completed by the same character the one that begins first.

    Text that could still become a stop string is held back, and released by the next
    calls or by `finish`.

    Args:
        stops: the stop strings; one string alone is taken as one stop string.

    Raises:
        ValueError: a stop string is empty or not a string.

    Example:
        >>> from dspark_jax.text import StopMatcher
        >>> matcher = StopMatcher(["ab"])
        >>> [matcher.feed(piece) for piece in ("x", "a", "b")]
        ['x', '', '']
        >>> matcher.match
        StopMatch(stop='ab', text_length=1, tokens=3)
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self.stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(f"`stop` has {stop!r}; allowed: strings, not empty")
        self.match: StopMatch | None = None
        self._held = ""
        self._released = 0
        self._tokens = 0

    def feed(self, piece: str) -> str:
        """Takes the text of one token and returns the text to show now.

        After a match nothing more is counted or returned.
        """
        if self.match is not None:
            return ""
        self._tokens += 1
        return self._scan(piece)

    def finish(self, tail: str = "") -> str:
        """Ends the text: `tail`, if nothing matched, and what was held back, once.

        Args:
            tail: text that no token finished, from `StreamDecoder.flush`.
        """
        if self.match is not None:
            return ""
        shown = self._scan(tail)
        rest, self._held = self._held, ""
        self._released += len(rest)
        return shown + rest

    def _scan(self, piece: str) -> str:
        # What could begin a stop string was held back, so every occurrence that
        # `piece` completes lies in this text.
        text = self._held + piece
        found = [
            (begin + len(stop), begin, stop)
            for stop in self.stops
            if (begin := text.find(stop)) >= 0
        ]
        if found:
            _, begin, stop = min(found)
            self.match = StopMatch(stop, self._released + begin, self._tokens)
            cut = begin
            self._held = ""
        else:
            cut = len(text) - self._open_suffix(text)
            self._held = text[cut:]
        self._released += cut
        return text[:cut]

    def _open_suffix(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0
