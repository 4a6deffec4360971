"""Prompts from files of public benchmarks' forms."""

import json

import pytest

from dspark_jax.prompt_files import FIELDS, PromptRecord, read_prompts

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
]
ANSWER = {"role": "assistant", "content": "Hi."}
MORE = {"role": "user", "content": "And?"}
RECORDS = {
    "gsm8k": ({"question": "How many?", "answer": "4"}, "How many?"),
    "mt-bench": ({"question_id": 81, "turns": ["First.", "Then."]}, "First."),
    "one-turn": ({"turns": "First."}, "First."),
    "alpaca": (
        {"instruction": "Sort.", "input": "b a", "output": "a b"},
        "Sort.\n\nb a",
    ),
    "alpaca-short": ({"instruction": "Sing.", "input": "", "output": "La"}, "Sing."),
    "humaneval": ({"task_id": "H/0", "prompt": "def f():", "test": "x"}, "def f():"),
    "math500": ({"problem": "1+1", "solution": "2", "answer": "2"}, "1+1"),
    "messages": ({"messages": TALK}, TALK),
    # Cut after the user's last turn, not after the first one.
    "answered": ({"messages": [*TALK, ANSWER]}, TALK),
    "longer": ({"messages": [*TALK, ANSWER, MORE, ANSWER]}, [*TALK, ANSWER, MORE]),
    "text": ({"text": "Once upon"}, "Once upon"),
    # The fields have an order, and what is empty is not there.
    "both": ({"text": "answer", "prompt": "", "question": "Why?"}, "Why?"),
    "null": ({"turns": None, "messages": None, "prompt": "Go."}, "Go."),
    # Chat data that repeats its first turn.
    "chat": ({"prompt": "Hello?", "messages": TALK}, TALK),
    # Text is taken as it is; a line ends at \n only.
    "separators": ({"prompt": " a\u2028b\x85\n"}, " a\u2028b\x85\n"),
}


def write(path, records):
    lines = [json.dumps(one, ensure_ascii=False) for one in records]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", RECORDS)
def test_fields(name, tmp_path):
    record, prompt = RECORDS[name]
    file = write(tmp_path / "one.jsonl", [record])
    assert read_prompts(file) == [PromptRecord(prompt)]


def test_records_of_all_fields_are_read_in_order(tmp_path):
    file = write(tmp_path / "all.jsonl", [record for record, _ in RECORDS.values()])
    found = [one.prompt for one in read_prompts(str(file))]
    assert found == [prompt for _, prompt in RECORDS.values()]
    assert set(FIELDS) <= {field for record, _ in RECORDS.values() for field in record}


DOMAINS = {
    "domain": ({"domain": "chat"}, "chat"),
    "category": ({"category": "coding"}, "coding"),
    "both": ({"category": "coding", "domain": "chat"}, "chat"),
    "empty": ({"category": "coding", "domain": ""}, "coding"),
    "null": ({"category": None, "domain": None}, None),
    "none": ({}, None),
}


@pytest.mark.parametrize("name", DOMAINS)
def test_domains(name, tmp_path):
    fields, domain = DOMAINS[name]
    file = write(tmp_path / "one.jsonl", [{"prompt": "a", **fields}])
    assert read_prompts(file) == [PromptRecord("a", domain)]


# What a line is, and what is said about it: what was given, what is allowed.
WRONG = {
    "{]": ("'{]' is not JSON (Expecting", "one object a line"),
    "{'prompt': 1}": ("is not JSON (Expecting", "one object a line"),
    "{": ("'{' is not JSON", "one object a line"),
    "[1]": ("[1] is no object", "one object a line"),
    '["a"]': ("['a'] is no object", "one object a line"),
    '"a"': ("'a' is no object", "one object a line"),
    "{}": ("the fields are (none)", "one of turns, question, instruction"),
    '{"id": 1, "body": "b"}': ("fields are body, id", "one of turns, question"),
    '{"prompt": ""}': ("the fields are prompt", "not empty"),
    '{"prompt": 5}': ("`prompt` is 5", "text"),
    '{"prompt": 0}': ("`prompt` is 0", "text"),
    '{"prompt": " "}': ("`prompt` is ' '", "text, not empty"),
    '{"turns": [["a"]]}': ("`turns` is ['a']", "text"),
    '{"turns": []}': ("`turns` is []", "text"),
    '{"instruction": "a", "input": 3}': ("`input` is 3", "text"),
    '{"prompt": "a", "domain": 3}': ("`domain` is 3", "a string"),
    '{"prompt": "a", "category": ["b"]}': ("`category` is ['b']", "a string"),
    '{"messages": "hello"}': ("`messages` is 'hello'", "a list, not empty"),
    '{"messages": []}': ("`messages` is []", "a list, not empty"),
    '{"prompt": "a", "messages": []}': ("`messages` is []", "a list, not empty"),
    '{"messages": ["a"]}': ("`messages` is ['a']", 'of {"role", "content"} objects'),
    '{"messages": [{"content": "a"}]}': ("'content': 'a'", 'of {"role", "content"}'),
    '{"messages": [{"role": "user"}]}': ("'role': 'user'", 'of {"role", "content"}'),
    '{"messages": [{"role": "system", "content": "a"}]}': (
        "the roles system",
        "the role user",
    ),
    # Nothing is left of a conversation that only the assistant is in.
    '{"messages": [{"role": "assistant", "content": ""}]}': (
        "the roles assistant",
        "the role user",
    ),
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_lines_are_named(tmp_path, line):
    file = tmp_path / "p.jsonl"
    # An empty line counts.
    file.write_text('{"prompt": "a"}\n\n' + line)
    with pytest.raises(ValueError) as error:
        read_prompts(file)
    given, allowed = WRONG[line]
    before, after = str(error.value).split("; allowed: ")
    assert before.startswith(f"{file}, line 3: ")
    assert given in before and allowed in after
    assert "\n" not in str(error.value)


def test_long_values_are_cut(tmp_path):
    file = write(tmp_path / "p.jsonl", [{"messages": "hello " * 1000}])
    with pytest.raises(ValueError, match=r"`messages` is 'hello .*\.\.\.") as error:
        read_prompts(file)
    assert len(str(error.value)) < len(str(file)) + 200


def test_files_without_prompts(tmp_path):
    missing = tmp_path / "none.jsonl"
    with pytest.raises(ValueError, match=r"`prompts` names .*none\.jsonl, which cann"):
        read_prompts(missing)
    with pytest.raises(ValueError, match="allowed: a file of JSON lines$"):
        read_prompts(missing)
    with pytest.raises(ValueError, match="allowed: builtin or a file of JSON lines$"):
        read_prompts(missing, builtin=True)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(ValueError, match=r"latin\.jsonl, which cannot be read"):
        read_prompts(latin)
    for text in ("", "\n", " \n\n"):
        (tmp_path / "p.jsonl").write_text(text)
        with pytest.raises(ValueError, match=r"p\.jsonl has no prompts; allowed: one"):
            read_prompts(tmp_path / "p.jsonl")
