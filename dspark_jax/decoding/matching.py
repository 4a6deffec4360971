"""The host's walk: matchers say what may come next, drafts and rounds move them.

    text so far   anchor | draft 0   draft 1   draft 2 (refused)
    mask of row     0    |    1         2         -

A matcher is advanced draft by draft before a round, so that each row gets the mask of
what comes before it, and taken back behind the drafts that fell.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dspark_jax.decoding.masks import BITS, FREE, packed, words_of


@runtime_checkable
class Matcher(Protocol):
    """Tells which tokens may follow the tokens it has accepted.

    One serves one request from its first emitted token on; the prompt is none of
    its business. Where the text may end it must allow the request's stop ids, and
    once it accepted one it is not asked again.
    """

    @property
    def finished(self) -> bool:
        """Whether a token that ends the text was accepted."""
        ...

    def allowed(self) -> np.ndarray:
        """bool[V], or uint32[ceil(V / 32)] with bit i % 32 of word i // 32 for i."""
        ...

    def advance(self, token: int) -> bool:
        """Accepts a token that `allowed` named; False if it cannot."""
        ...

    def rollback(self, count: int) -> Any:
        """Forgets the last `count` accepted tokens, none of them a stop id."""
        ...


def check_matchers(matchers: Any, count: int, single: bool) -> list[Matcher | None]:
    """One matcher or None a request.

    Args:
      matchers: a list; for a single prompt also a matcher by itself.
      count: requests.
      single: whether the prompt is a single one.

    Raises:
      ValueError: another number of them, something else, or one of them twice.
    """
    one = single and isinstance(matchers, Matcher)
    given = [matchers] if one else matchers
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(
            f"`matchers` is {matchers!r}; allowed: a list with a matcher or None for "
            "each prompt"
        )
    if len(given) != count:
        raise ValueError(
            f"`matchers` has {len(given)} entries for {count} prompts; give one each, "
            "None for a prompt that is free"
        )
    for entry in given:
        if entry is not None and not isinstance(entry, Matcher):
            raise ValueError(
                f"`matchers` holds {entry!r}; allowed: None, or an object with "
                "`allowed`, `advance`, `rollback` and `finished`"
            )
    used = [id(entry) for entry in given if entry is not None]
    if len(set(used)) < len(used):
        raise ValueError(
            "`matchers` holds a matcher twice; give each request one of its own"
        )
    return list(given)


class Guide:
    """The matchers of a batch, kept in step with what its rounds emit."""

    def __init__(
        self,
        matchers: Sequence[Matcher | None],
        stop_ids: Sequence[Collection[int]],
        size: int,
        vocab: int,
        draft_length: int,
    ):
        """A guide for fresh matchers.

        Args:
          matchers: of each request; None leaves it free.
          stop_ids: of each request.
          size: B, requests of the batch bucket.
          vocab: V.
          draft_length: n.
        """
        self._matchers, self._stop_ids = list(matchers), list(stop_ids)
        self._vocab = vocab
        self._shape = (size, draft_length + 1, words_of(vocab))
        # Bits behind the vocabulary mean nothing.
        self._last = np.uint32(2 ** ((vocab - 1) % BITS + 1) - 1)
        # Drafts that each matcher has accepted and no round has emitted yet.
        self._walked: list[list[int]] = [[] for _ in matchers]

    def first(
        self, places: Sequence[int] | None = None, size: int | None = None
    ) -> np.ndarray:
        """uint32[size, W]: what first tokens may be, of the requests in `places`.

        None: of all of them, with B rows.
        """
        masks = np.full((size or self._shape[0], self._shape[2]), FREE)
        places = range(len(self._matchers)) if places is None else places
        for row, place in enumerate(places):
            matcher = self._matchers[place]
            if matcher is not None:
                masks[row] = self._must(place, matcher)
        return masks

    def join(
        self, place: int, matcher: Matcher | None, stop_ids: Collection[int]
    ) -> None:
        """Another request takes a place."""
        self._matchers[place], self._stop_ids[place] = matcher, stop_ids
        self._walked[place] = []

    def take(self, emitted: Sequence[Sequence[int]]) -> None:
        """Brings the matchers behind what a round emitted for each request."""
        for row, (matcher, tokens) in enumerate(
            zip(self._matchers, emitted, strict=True)
        ):
            if matcher is None:
                continue
            walked, self._walked[row] = self._walked[row], []
            common = 0
            while common < min(len(walked), len(tokens)):
                if walked[common] != tokens[common]:
                    break
                common += 1
            if common < len(walked):
                matcher.rollback(len(walked) - common)
            for token in tokens[common:]:
                self._advance(row, matcher, token)

    def masks(
        self, proposed: Sequence[Sequence[int]], running: Sequence[bool]
    ) -> np.ndarray:
        """Masks of the next round's rows.

        Args:
          proposed: the drafts that wait, by request.
          running: requests that are asked.

        Returns:
          uint32[B, n + 1, W]. Rows that nothing is emitted from allow everything.
        """
        masks = np.full(self._shape, FREE)
        for row, (matcher, drafts, runs) in enumerate(
            zip(self._matchers, proposed, running, strict=True)
        ):
            if matcher is None or not runs:
                continue
            masks[row, 0] = self._must(row, matcher)
            for step, draft in enumerate(drafts):
                # Nothing is emitted behind a stop, nor behind a draft that its mask
                # gives no chance.
                if draft in self._stop_ids[row] or not _has(masks[row, step], draft):
                    break
                self._advance(row, matcher, draft)
                self._walked[row].append(draft)
                if matcher.finished:
                    break
                masks[row, step + 1] = self._ask(row, matcher)
        return masks

    def _must(self, row: int, matcher: Matcher) -> np.ndarray:
        """The mask of a row that certainly emits a token."""
        if matcher.finished:
            raise ValueError(
                f"the matcher in place {row} has finished but the request runs on; "
                "the token that ends its text must be one of the request's stop ids, "
                f"which are {sorted(self._stop_ids[row])}"
            )
        mask = self._ask(row, matcher)
        if not mask.any():
            raise ValueError(
                f"the matcher in place {row} allows no token; where its text is "
                "complete it must allow one of the request's stop ids, which are "
                f"{sorted(self._stop_ids[row])}"
            )
        return mask

    def _ask(self, row: int, matcher: Matcher) -> np.ndarray:
        allowed = np.asarray(matcher.allowed())
        if allowed.dtype == bool and allowed.shape == (self._vocab,):
            return packed(allowed)
        if allowed.dtype == np.uint32 and allowed.shape == self._shape[2:]:
            mask = allowed.copy()
            mask[-1] &= self._last
            return mask
        raise ValueError(
            f"the matcher in place {row} allows {allowed.dtype}"
            f"{list(allowed.shape)}; it must be bool[{self._vocab}] or "
            f"uint32[{self._shape[2]}]"
        )

    def _advance(self, row: int, matcher: Matcher, token: int) -> None:
        if matcher.finished or not matcher.advance(token):
            raise ValueError(
                f"the matcher in place {row} does not accept token {token}, which "
                "it allowed; its masks and its steps must agree"
            )


def _has(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // BITS] >> np.uint32(token % BITS) & np.uint32(1))
