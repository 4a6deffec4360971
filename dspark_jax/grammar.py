"""Matchers of JSON schemas, regular expressions and grammars, made with llguidance.

The library is the extra `grammar`; nothing else here needs it.

    grammars = Grammars(model)
    generate(model, prompt, matchers=grammars.json_schema(schema))
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dspark_jax.decoding.masks import words_of
from dspark_jax.model import Model
from dspark_jax.text import Tokenizer

# As `json.dumps` writes them.
SEPARATORS = (", ", ": ")


class Grammars:
    """A model's vocabulary, ready for grammars.

    Making one takes a second or two, a grammar of it some milliseconds.
    """

    def __init__(self, model: Model, stop_ids: Collection[int] | None = None):
        """Reads the bytes of every token.

        Args:
          model: with a tokenizer.
          stop_ids: what ends a text, the same as the requests' `stop_ids`; None takes
            the model's.

        Raises:
          ValueError: llguidance is missing, the model has no tokenizer, or there is
            no stop id.
        """
        if model.tokenizer is None:
            raise ValueError(f"model {model.name!r} has no tokenizer to read tokens of")
        vocab = model.spec.target.vocab_size
        ends = model.spec.target.eos_ids if stop_ids is None else tuple(stop_ids)
        if not ends or not all(0 <= end < vocab for end in ends):
            raise ValueError(
                f"`stop_ids` is {ends}; allowed: one id or more, each below {vocab}, "
                "as a text ends with one"
            )
        library: Any = _library()
        tokens = library.TokenizerWrapper(_Tokens(model.tokenizer, vocab, ends[0]))
        self._library, self._ends = library, frozenset(ends)
        self._tokens = library.LLTokenizer(tokens, n_vocab=vocab, eos_token=list(ends))

    def json_schema(
        self,
        schema: str | Mapping[str, Any],
        separators: tuple[str, str] | None = SEPARATORS,
    ) -> GrammarMatcher:
        """A fresh matcher of JSON texts that conform to a schema.

        Args:
          schema: as an object or as text.
          separators: between items and behind keys, and no other white space; None
            allows any, of which small models may write a lot.

        Raises:
          ValueError: a schema that is none, or has what the library cannot express.
        """
        text = schema if isinstance(schema, str) else json.dumps(dict(schema))
        form: dict[str, Any] = {"whitespace_flexible": separators is None}
        if separators is not None:
            form |= dict(
                zip(("item_separator", "key_separator"), separators, strict=True)
            )
        make = self._library.LLMatcher.grammar_from_json_schema
        try:
            grammar = make(text, overrides=form)
        except ValueError as error:
            raise ValueError(f"`schema` is no JSON schema: {error}") from None
        return self._matcher(grammar, "schema")

    def regex(self, pattern: str) -> GrammarMatcher:
        """A fresh matcher of texts that match `pattern` as a whole.

        Raises:
          ValueError: a pattern that is none.
        """
        make = self._library.LLMatcher.grammar_from_regex
        return self._matcher(make(pattern), "pattern")

    def lark(self, grammar: str) -> GrammarMatcher:
        """A fresh matcher of a context-free grammar in llguidance's Lark dialect.

        Raises:
          ValueError: a grammar that is none.
        """
        make = self._library.LLMatcher.grammar_from_lark
        return self._matcher(make(grammar), "grammar")

    def _matcher(self, grammar: str, name: str) -> GrammarMatcher:
        matcher = self._library.LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"`{name}` is refused: {_reason(matcher)}")
        return GrammarMatcher(matcher, self._tokens.vocab_size, self._ends)


class GrammarMatcher:
    """A `Matcher` of one request; see `Grammars`."""

    def __init__(self, matcher: Any, vocab: int, ends: frozenset[int]):
        """Wraps an `LLMatcher` that has accepted nothing yet."""
        self._matcher, self._ends = matcher, ends
        self._words = words_of(vocab)
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether a stop id was accepted."""
        return self._finished

    def allowed(self) -> np.ndarray:
        """uint32[ceil(V / 32)].

        Raises:
          ValueError: the library gave up on a grammar that is too large.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), "<u4")
        if self._matcher.is_error():
            raise ValueError(f"the grammar failed: {_reason(self._matcher)}")
        # The library's own masks may have a word more.
        return mask[: self._words].astype(np.uint32)

    def advance(self, token: int) -> bool:
        """Accepts a token; False if the grammar does not, which ends the matcher."""
        if not self._matcher.consume_token(token):
            return False
        self._finished = token in self._ends
        return True

    def rollback(self, count: int) -> None:
        """Forgets the last `count` accepted tokens."""
        if not self._matcher.rollback(count):
            raise ValueError(f"the grammar failed: {_reason(self._matcher)}")
        self._finished = False


class _Tokens:
    """What llguidance wants to know of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int, end: int):
        self._tokenizer = tokenizer
        self.eos_token_id = end
        whole = [tokenizer.token_bytes(i, skip_special=False) for i in range(vocab)]
        self.tokens = whole
        # Special tokens are no text, however they are spelled.
        self.special_token_ids = [
            i for i, data in enumerate(whole) if data and not tokenizer.token_bytes(i)
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode()
        return self._tokenizer.encode(text, special=False)


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise ValueError(
            "grammars need llguidance; run: pip install 'dspark-jax[grammar]'"
        ) from None


def _reason(matcher: Any) -> str:
    """An error on one line, without the library's state behind it."""
    message, *_ = str(matcher.get_error()).split("<state>")
    return " ".join(message.split())
