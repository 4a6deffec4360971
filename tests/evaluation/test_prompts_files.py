"""Prompts from files of public benchmarks' forms."""

import json

import pytest

from dspark_jax.evaluation.prompts import held_out
from dspark_jax.evaluation.prompts_files import gather, prompt_of, read_prompts

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello?"},
]
RECORDS = {
    "gsm8k": ({"question": "How many?", "answer": "4"}, "How many?"),
    "mt-bench": ({"question_id": 81, "turns": ["First.", "Then."]}, "First."),
    "alpaca": (
        {"instruction": "Sort.", "input": "b a", "output": "a b"},
        "Sort.\n\nb a",
    ),
    "alpaca-short": ({"instruction": "Sing.", "input": "", "output": "La"}, "Sing."),
    "humaneval": ({"task_id": "H/0", "prompt": "def f():", "test": "x"}, "def f():"),
    "math500": ({"problem": "1+1", "solution": "2", "answer": "2"}, "1+1"),
    "messages": (
        {"messages": [*TALK, {"role": "assistant", "content": "Hi."}]},
        TALK,
    ),
    "text": ({"text": "Once upon"}, "Once upon"),
    # The fields have an order.
    "both": ({"text": "answer", "prompt": "", "question": "Why?"}, "Why?"),
}


def write(path, records):
    lines = [json.dumps(one) for one in records]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", RECORDS)
def test_fields(name):
    record, prompt = RECORDS[name]
    assert prompt_of(record) == prompt


def test_domains_are_files_and_categories(tmp_path):
    plain = write(tmp_path / "gsm8k.jsonl", [RECORDS["gsm8k"][0]] * 3)
    categories = [{"category": c, "turns": [c]} for c in ("math", "coding", "math")]
    bench = write(tmp_path / "mt.jsonl", categories)
    assert read_prompts(plain) == {"gsm8k": ["How many?"] * 3}
    found = gather(["builtin", plain, bench], limit=2)
    assert found["gsm8k"] == ["How many?"] * 2 and found["coding"] == ["coding"]
    # A category of the file joins the domain of the same name; the limit is for both.
    assert found["math"] == held_out(2)["math"]
    assert gather([bench, "builtin"])["math"][:3] == [
        "math",
        "math",
        held_out()["math"][0],
    ]


def test_what_is_wrong_with_a_file_is_said(tmp_path):
    unknown = write(tmp_path / "odd.jsonl", [{"text": "a"}, {"body": "b", "id": 1}])
    with pytest.raises(ValueError) as error:
        read_prompts(unknown)
    # Line 3: there is an empty one between.
    for part in ("odd.jsonl, line 3", "body, id", "turns, question, instruction"):
        assert part in str(error.value)
    cases = {
        "{]": "line 1 is not JSON",
        "[1]": "no JSON object",
        "": "has no prompts",
        '{"prompt": 5}': "`prompt` is 5; it must be text",
        '{"turns": [["a"]]}': "`turns` is .* must be text",
        '{"messages": "hello"}': "`messages` must be a list",
        '{"messages": [{"role": "system", "content": "a"}]}': "role user",
    }
    for text, message in cases.items():
        file = tmp_path / "case.jsonl"
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_prompts(file)
    with pytest.raises(ValueError, match="missing.jsonl.*builtin or a file"):
        gather([tmp_path / "missing.jsonl"])
    for limit in (0, -1):
        with pytest.raises(ValueError, match="`limit`"):
            gather(["builtin"], limit)
    with pytest.raises(ValueError, match="`prompts`"):
        gather([])
