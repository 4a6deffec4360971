"""`data`, `eval` and `calibrate` read prompts in the same way."""

import importlib
import json

import pytest

# Module, what does its work, what else a command line needs.
COMMANDS = {
    "data": ("data", "generate_data", ("--out", "nowhere", "--sequences", 3)),
    "eval": ("eval", "evaluate", ()),
    "calibrate": ("calibrate", "run_calibration", ()),
}
TALK = [{"role": "user", "content": "Hello?"}]
LINES = [
    {"question": "How many?"},
    {"turns": ["First.", "Then."]},
    {"instruction": "Sort.", "input": "b a"},
    {"messages": [*TALK, {"role": "assistant", "content": "Hi."}]},
    {"prompt": "red", "category": "colours"},
]
PROMPTS = ["How many?", "First.", "Sort.\n\nb a", TALK, "red"]


@pytest.fixture(params=COMMANDS)
def command(request, run, monkeypatch):
    """Runs a command up to its work: (what came out, the prompts it would take)."""
    name, work, options = COMMANDS[request.param]
    module, seen = importlib.import_module(f"dspark_jax.cli.{name}"), []

    def stop(model, prompts, *_, **__):
        seen.append(prompts)
        raise ValueError("far enough")

    monkeypatch.setattr(module, work, stop)
    monkeypatch.setattr(module, "load_model", lambda *_: None)
    return lambda *args: (run(request.param, *options, *args), seen)


def test_all_fields_are_understood(command, tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    done, seen = command("--prompts", file)
    assert done.stderr == "error: far enough\n"
    (found,) = seen
    if isinstance(found, dict):
        assert found == {"some": PROMPTS[:4], "colours": PROMPTS[4:]}
    else:
        assert found == PROMPTS


def test_errors_are_the_same(command, tmp_path):
    file = tmp_path / "odd.jsonl"
    file.write_text('{"question": "Why?"}\n{"body": 1}\n')
    for given, message in (
        (file, f"{file}, line 2: the fields are body; allowed: one of turns, question"),
        (tmp_path / "none", f"`prompts` names {tmp_path / 'none'}, which cannot be re"),
    ):
        done, seen = command("--prompts", given)
        assert done.exit_code == 2 and not seen
        assert done.stderr.startswith(f"error: {message}")
        assert done.stderr.count("\n") == 1
