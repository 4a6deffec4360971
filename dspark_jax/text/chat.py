"""Chat templates: messages to the text that a chat model was trained on."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from dspark_jax.text.tokenizer import Tokenizer

Messages = str | Sequence[Mapping[str, Any]]


def render_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The text of a conversation; encode it with `special=False`.

    Args:
        tokenizer: whose template to use.
        messages: a list of `{"role": ..., "content": ...}`, or a string: one user turn.
        add_generation_prompt: end with the header of the assistant's turn.
        **variables: further template variables, such as `tools` or
            `enable_thinking`.

    Raises:
        ValueError: there is no template, the messages have another form, or the
            template refuses them.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "the tokenizer has no chat template; pass chat=False to continue plain "
            "text, or a tokenizer folder with a chat_template.jinja"
        )
    values: dict[str, Any] = {"tools": None, "documents": None}
    values |= tokenizer.special_tokens
    values |= variables
    values["messages"] = _as_messages(messages)
    values["add_generation_prompt"] = add_generation_prompt
    try:
        return _compiled(tokenizer.chat_template).render(**values)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error


def next_turn(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    last_token: int | None = None,
    **variables: Any,
) -> str:
    """The text to append to a conversation that ends with an assistant turn.

    It is what the template writes after an assistant turn when `messages` follow: the
    end-of-turn token, whatever stands between turns, the new messages, the header of
    the assistant's next turn. It is found by rendering a conversation whose assistant
    turn is a marker and cutting through the marker, so that nothing in front of it (a
    default system prompt, a BOS) is repeated. Encode it with `special=False`.

    The earlier turns stay as they were generated. Templates that rewrite earlier
    turns, as some drop their reasoning, would give another text.

    Args:
        tokenizer: whose template to use.
        messages: the messages to append; a string is one user turn.
        last_token: the token that the conversation ends with. If it is the one with
            which the template closes a turn, it is not written again; after any other
            (a length limit, a stop string) the turn is closed first.
        **variables: as for `render_chat`.

    Raises:
        ValueError: as for `render_chat`, and if the template does not write the
            assistant's turn exactly once as it is.
    """
    marker = _marker(messages)
    turns = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": marker},
        *_as_messages(messages),
    ]
    _, found, rest = render_chat(tokenizer, turns, **variables).partition(marker)
    if not found or marker in rest:
        raise ValueError(
            "the chat template does not write an assistant turn exactly once as it "
            "is; render the whole conversation instead of continuing"
        )
    if last_token is not None and last_token in tokenizer.eos_ids:
        end = tokenizer.backend.id_to_token(int(last_token))
        if end and rest.lstrip().startswith(end):
            return rest.lstrip().removeprefix(end)
    return rest


def _marker(messages: Messages) -> str:
    """A word that is not in `messages`."""
    text, number = str(messages), 0
    while (marker := f"marker{number}reply") in text:
        number += 1
    return marker


def _as_messages(messages: Messages) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    turns = list(messages) if isinstance(messages, Sequence) else []
    if not turns or not all(isinstance(m, Mapping) and "role" in m for m in turns):
        raise ValueError(
            f"`messages` is {messages!r}; allowed: a string, or a list of "
            'dicts like {"role": "user", "content": "..."}, not empty'
        )
    return [dict(message) for message in turns]


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    """Templates come with checkpoints: they run in a sandbox, without mutation."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks trainable text; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
