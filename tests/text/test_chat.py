"""Chat templates: rendering, its errors, and continuing a conversation."""

import dataclasses
import datetime

import pytest

from dspark_jax.text import Tokenizer, load_tokenizer, next_turn, render_chat

SYSTEM = "<|im_start|>system\nAnswer briefly.<|im_end|>\n"


@pytest.fixture(scope="module")
def small(data_dir) -> Tokenizer:
    return load_tokenizer(data_dir / "tokenizer")


def with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    return dataclasses.replace(tokenizer, chat_template=template)


def test_a_string_is_one_user_turn(small):
    text = render_chat(small, "Hi")
    assert text == (f"{SYSTEM}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text == render_chat(small, [{"role": "user", "content": "Hi"}])


def test_without_the_generation_prompt(small):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]
    assert render_chat(small, messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_special_tokens_of_a_rendered_chat_are_one_id_each(small):
    ids = small.encode(render_chat(small, "Hi"), special=False)
    assert ids.count(1) == 3
    assert ids.count(2) == 2


def test_missing_template(small):
    with pytest.raises(ValueError, match="no chat template; pass chat=False"):
        render_chat(with_template(small, None), "Hi")


def test_template_that_refuses(small):
    with pytest.raises(ValueError, match="refuses the messages: Unknown role tool"):
        render_chat(small, [{"role": "tool", "content": "x"}])
    with pytest.raises(ValueError, match="chat template"):
        render_chat(with_template(small, "{% if %}"), "Hi")


@pytest.mark.parametrize("messages", [[], [{"content": "x"}], ["Hi"], 3])
def test_messages_of_another_form(small, messages):
    with pytest.raises(ValueError, match="`messages` is"):
        render_chat(small, messages)


def test_templates_run_in_a_sandbox(small):
    for attack in (
        "{{ messages.__class__.__mro__ }}",
        "{% set _ = messages.append(1) %}",
    ):
        with pytest.raises(ValueError, match="chat template"):
            render_chat(with_template(small, attack), "Hi")


def test_what_published_templates_use(small):
    def render(template: str, **variables) -> str:
        return render_chat(with_template(small, template), "é<", **variables)

    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "é<"}]'
    assert render("{{ {'b': 1} | tojson(indent=1) }}") == '{\n "b": 1\n}'
    assert render("{% generation %}{{ eos_token }}{% endgeneration %}") == "<|im_end|>"
    assert render("{% for x in [1, 2, 3] %}{{ x }}{% break %}{% endfor %}") == "1"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{% if tools %}tools{% else %}none{% endif %}") == "none"
    year = render("{{ strftime_now('%Y') }}")
    assert abs(int(year) - datetime.date.today().year) <= 1


def test_next_turn_after_a_closed_turn_equals_the_whole_conversation(small):
    turns = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ]
    state = render_chat(small, turns[:1]) + "Two.<|im_end|>"
    text = next_turn(small, "Three?", last_token=2)
    assert state + text == render_chat(small, turns)


@pytest.mark.parametrize("last_token", [None, 0, 30])
def test_next_turn_closes_an_open_turn(small, last_token):
    # 0 also ends generation, but it is not what the template closes a turn with.
    text = next_turn(small, "Three?", last_token=last_token)
    assert text == (
        "<|im_end|>\n<|im_start|>user\nThree?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_next_turn_does_not_mistake_the_message_for_its_marker(small):
    text = next_turn(small, "marker0reply", last_token=2)
    assert text == (
        "\n<|im_start|>user\nmarker0reply<|im_end|>\n<|im_start|>assistant\n"
    )


def test_next_turn_with_white_space_before_the_end_token(small):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} \n{{ eos_token }}"
        "{% endfor %}"
    )
    tokenizer = with_template(small, template)
    assert next_turn(tokenizer, "b", last_token=2) == "user: b \n<|im_end|>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    ],
)
def test_next_turn_refuses_templates_that_rewrite_turns(small, template):
    with pytest.raises(ValueError, match="exactly once"):
        next_turn(with_template(small, template), "Hi")
