"""`generate`: the JSON object, the text, errors, and the folder for programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
STATS = {
    "rounds",
    "generated",
    "accepted_length",
    "verified_rows",
    "drafted",
    "tokens_per_second",
    "compile_seconds",
    "programs",
    "implementation",
}


@pytest.fixture
def pair(tiny):
    return ("--model", tiny / "target", "--draft", tiny / "draft")


def test_json_is_one_object_with_all_figures(run, pair):
    done = run("generate", *pair, "--max-new-tokens", 9, "--json", "one two")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 1
    out = json.loads(done.stdout)
    assert set(out) >= {"text", "tokens", "finish_reason", "stats"}
    stats = out["stats"]
    assert set(stats) >= STATS
    assert stats["generated"] == len(out["tokens"]) <= 9
    assert stats["drafted"] == 4 * stats["rounds"]
    assert stats["verified_rows"] == 5 * stats["rounds"]


@pytest.mark.slow
def test_text_equals_the_json_text_and_plain_runs_too(run, pair):
    args = (*pair, "--seed", 3, "--max-new-tokens", 9, "--temperature", 0.8)
    args = (*args, "--top-k", 12, "--draft-length", 2)
    out = json.loads(run("generate", *args, "--json", "one two").stdout)
    assert out["stats"]["drafted"] == 2 * out["stats"]["rounds"]
    # The same seed without JSON prints the same text and one newline.
    assert run("generate", *args, "one two").stdout == out["text"] + "\n"

    args = (*pair[:2], "--draft", "none", "--max-new-tokens", 5, "--no-chat")
    plain = run("generate", *args, "--json", "one two")
    assert plain.exit_code == 0, plain.output
    assert json.loads(plain.stdout)["stats"]["drafted"] == 0


def test_errors_are_one_line_and_status_2(run, tiny):
    model = ("--model", tiny / "target")
    wrong = [
        (("--temperature", "-1"), "`temperature` is -1.0"),
        (("--verification", "gumbel"), "allowed: 'exact', 'shared_noise'"),
        (("--implementation", "pallas"), "'pallas' cannot run here"),
        (("--top-p", "0"), "`top_p` is 0.0"),
        ((*model, "--draft-length", "3"), "loaded without a draft"),
        ((*model, "--max-new-tokens", "0"), "`max_new_tokens` is 0"),
        ((*model, "--dtype", "int3"), "`dtype` is 'int3'"),
        ((*model, "--draft", tiny / "none-here"), "none-here"),
        (("--model", "no-such-model"), "no-such-model"),
    ]
    for args, message in wrong:
        done = run("generate", *args, "hello")
        assert done.exit_code == 2, done.output
        assert done.stdout == ""
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert message in done.stderr
    long = run("generate", *model, "hello " * 600)
    assert long.exit_code == 2 and long.stderr.count("\n") == 1
    assert "needs room" in long.stderr


def test_info_and_version(run, tiny):
    facts = json.loads(run("info", tiny / "target", "--json").stdout)
    assert facts["kind"] == "target" and facts["format"] == "safetensors"
    assert run("--version").stdout.count(".") == 2


def test_no_compile_folder_without_being_asked():
    assert jax.config.jax_compilation_cache_dir is None


def _in_a_fresh_process(tiny: Path, folder: Path) -> dict:
    command = [sys.executable, "-c", "from dspark_jax.cli.main import app; app()"]
    command += ["generate", "--model", str(tiny / "target")]
    command += ["--draft", str(tiny / "draft"), "--max-new-tokens", "12", "--json"]
    done = subprocess.run(
        [*command, "--compile-cache", str(folder), "one two"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_fr50_second_process_uses_the_programs_of_the_first(tiny, tmp_path):
    first = _in_a_fresh_process(tiny, tmp_path)
    made = {file.name for file in tmp_path.rglob("*-cache")}
    assert len(made) >= first["stats"]["programs"]
    second = _in_a_fresh_process(tiny, tmp_path)
    assert {file.name for file in tmp_path.rglob("*-cache")} == made
    assert second["tokens"] == first["tokens"]
    spent = [out["stats"]["compile_seconds"] for out in (first, second)]
    assert spent[1] <= spent[0] / 2
