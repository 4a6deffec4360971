"""Where a chat template lets the model write the user's turn as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspark_jax.text import Tokenizer, next_turn, render_chat

# Stands for what the user says; no template writes it by itself.
SENTINEL = "sentinel0question"


@dataclass(frozen=True)
class Turns:
    """Token ids that stand between what the model writes.

        opening question close answer_header answer close question_header ...

    Attributes:
      opening: from the start to where the first question begins.
      answer_header: between the token that closes a question and the answer.
      question_header: between the token that closes an answer and the next question.
      close: the token that ends a turn; the model writes it.
    """

    opening: tuple[int, ...]
    answer_header: tuple[int, ...]
    question_header: tuple[int, ...]
    close: int


def invented_turns(tokenizer: Tokenizer, eos_ids: Sequence[int]) -> Turns:
    """The turns of a template whose user turn ends with a stop token.

    The template renders a sentinel as the user's words and is cut there.

    Args:
      tokenizer: whose template.
      eos_ids: tokens at which the model stops.

    Raises:
      ValueError: the template does not write the user's words exactly once as they
        are, closes a turn with something that is no stop token, or closes user
        and assistant in two ways.
    """
    opening, close_question = _cut(render_chat(tokenizer, SENTINEL))
    ends = {i: tokenizer.backend.id_to_token(int(i)) for i in eos_ids}
    found = [
        (i, text)
        for i, text in ends.items()
        if text and close_question.lstrip().startswith(text)
    ]
    if not found:
        written = close_question.lstrip()[:20]
        raise ValueError(
            f"the chat template goes on after the user's words with {written!r}, which "
            f"is none of the stop tokens {sorted(t for t in ends.values() if t)}, so "
            "the model cannot end a question by itself; use invent=0"
        )
    close, text = found[0]
    answer_header = close_question.lstrip().removeprefix(text)
    after_any = next_turn(tokenizer, SENTINEL)
    if not after_any.lstrip().startswith(text):
        raise ValueError(
            f"the chat template closes the user's turn with {text!r}, but not the "
            "assistant's; use invent=0"
        )
    later = next_turn(tokenizer, SENTINEL, last_token=close)
    question_header, again = _cut(later)
    if again != close_question:
        raise ValueError(
            "the chat template writes a second user turn in another way than the "
            "first; use invent=0"
        )

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, special=False))

    return Turns(ids(opening), ids(answer_header), ids(question_header), close)


def _cut(text: str) -> tuple[str, str]:
    """`text` before and after the sentinel."""
    before, found, after = text.partition(SENTINEL)
    if not found or SENTINEL in after:
        raise ValueError(
            "the chat template does not write the user's words exactly once as they "
            "are, so there is no place to let the model write them; use invent=0"
        )
    return before, after
