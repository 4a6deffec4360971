"""Prompts of several sources, by domain."""

import json

import pytest

from dspark_jax.evaluation import gather, held_out


def write(path, records):
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_domains_are_files_and_categories(tmp_path):
    plain = write(tmp_path / "gsm8k.jsonl", [{"question": "How many?"}] * 3)
    categories = [{"category": c, "turns": [c]} for c in ("math", "coding", "math")]
    bench = write(tmp_path / "mt.jsonl", categories)
    assert gather([plain]) == {"gsm8k": ["How many?"] * 3}
    found = gather(["builtin", plain, bench], limit=2)
    assert found["gsm8k"] == ["How many?"] * 2 and found["coding"] == ["coding"]
    # A category of the file joins the domain of the same name; the limit is for both.
    assert found["math"] == held_out(2)["math"]
    assert gather([bench, "builtin"])["math"][:3] == [
        "math",
        "math",
        held_out()["math"][0],
    ]
    # What training data calls it.
    named = write(tmp_path / "d.jsonl", [{"prompt": "a", "domain": "chat"}])
    assert gather([str(named)]) == {"chat": ["a"]}


def test_what_is_wrong_is_said(tmp_path):
    unknown = write(tmp_path / "odd.jsonl", [{"text": "a"}, {"body": "b", "id": 1}])
    with pytest.raises(ValueError, match=r"odd\.jsonl, line 2: .* body, id; allowed"):
        gather(["builtin", unknown])
    with pytest.raises(ValueError, match="missing.jsonl.*builtin or a file"):
        gather([tmp_path / "missing.jsonl"])
    for limit in (0, -1):
        with pytest.raises(ValueError, match="`limit`"):
            gather(["builtin"], limit)
    with pytest.raises(ValueError, match="`prompts`"):
        gather([])
