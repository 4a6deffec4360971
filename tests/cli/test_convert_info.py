"""`convert` and `info` as commands, and the script."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dspark_jax.checkpoint.load import read_params
from dspark_jax.checkpoint.native import write_native
from dspark_jax.cli.convert import convert
from dspark_jax.cli.info import info

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(convert)
    app.command()(info)
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])


def test_convert_then_info(run, data_dir, tmp_path):
    made = run("convert", data_dir / "qwen3_rand/draft_rnn", tmp_path / "out")
    assert made.exit_code == 0, made.output
    # No bar, no colour codes: the output is not a terminal.
    assert made.stdout.count("\n") == 1 and "\x1b" not in made.output
    assert "draft, 138,305 parameters, 553.2 kB, verified" in made.stdout

    shown = run("info", tmp_path / "out", "--json")
    facts = json.loads(shown.stdout)
    assert facts["format"] == "orbax" and facts["kind"] == "draft"
    assert facts["parameters"] == 138305 and facts["bytes"] == 553220
    assert facts["config"]["markov_head"] == "rnn"
    assert facts["origin"]["architecture"] == "Qwen3DSparkModel"
    published = json.loads(
        run("info", data_dir / "qwen3_rand/draft_rnn", "--json").stdout
    )
    assert published["format"] == "safetensors"
    assert published["families"] == facts["families"]

    table = run("info", tmp_path / "out")
    assert table.exit_code == 0 and "markov_head" in table.stdout


def test_info_of_a_draft_in_our_own_layout(run, data_dir, tmp_path):
    _, config, params = read_params(data_dir / "qwen3_rand/draft_rnn", tables="target")
    write_native(tmp_path / "draft", config, params)
    facts = json.loads(run("info", tmp_path / "draft", "--json").stdout)
    assert facts["format"] == "native draft" and facts["kind"] == "draft"
    assert facts["parameters"] == 138305 - 2 * 320 * 64


def test_options(run, data_dir, tmp_path):
    source = data_dir / "llama_rand/target"
    made = run("convert", source, tmp_path / "a", "--dtype", "bfloat16", "--no-verify")
    assert made.exit_code == 0 and "verified" not in made.stdout
    facts = json.loads(run("info", tmp_path / "a", "--json").stdout)
    assert facts["config"]["dtype"] == "bfloat16"
    assert facts["bytes"] == 2 * facts["parameters"]


def test_errors_are_one_line_and_a_status(run, data_dir, tmp_path):
    source = data_dir / "llama_rand/target"
    wrong = [
        ("convert", tmp_path / "nothing", tmp_path / "out"),
        ("convert", source, tmp_path / "out", "--dtype", "int3"),
        ("info", tmp_path / "nothing"),
    ]
    for args in wrong:
        result = run(*args)
        assert result.exit_code == 2
        assert result.output.startswith("error: ") and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_script(data_dir, tmp_path):
    command = [sys.executable, str(ROOT / "scripts/convert_checkpoint.py")]
    source = data_dir / "llama_rand/target"
    done = subprocess.run(
        [*command, str(source), str(tmp_path / "out"), "--dtype", "float16"],
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu", "PATH": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "target, 193,088 parameters" in done.stdout
