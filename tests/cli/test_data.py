"""`data`: a folder of text, by the tiny target on disk."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from dspark_jax.cli.data import _progress
from dspark_jax.training.sequences import read_sequences

SMALL = ("--length", 96, "--batch", 2, "--sequences", 3, "--shard", 2)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "one two", "domain": "chat"}, {"question": "three"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_folder_is_written_and_gone_on_with(run, tiny, prompts, tmp_path):
    args = ("--model", tiny / "target", "--prompts", prompts, "--out", tmp_path / "d")
    done = run("data", *args, *SMALL)
    assert done.exit_code == 0, done.output
    text = read_sequences(tmp_path / "d")
    assert text.tokens.shape == (3, 96)
    np.testing.assert_array_equal(text.temperature, np.float32([0.0, 1.0, 0.7]))
    wrote = int(text.written.sum())
    first, second, third = done.stdout.splitlines()
    assert f"3 sequences; {wrote} answer tokens" in first and "padding" in first
    assert second == "2 prompts (chat 1, no domain 1)"
    assert third.startswith(f"{wrote} tokens written in ") and "tokens/s" in third
    # Not a terminal: a line for each shard, no bar.
    shards = [line for line in done.stderr.splitlines() if line.startswith("part-")]
    assert len(shards) == 2 and "2 of 3 sequences" in shards[0]
    again = run("data", *args, *SMALL)
    assert again.stdout.splitlines()[2] == "nothing was left to write"
    other = run("data", *args, *SMALL, "--seed", 1)
    assert other.exit_code == 2 and other.stderr.count("\n") == 1
    assert "seed 0, now 1" in other.stderr


def test_errors_are_one_line_before_a_model_is_read(run, prompts, tmp_path):
    out = ("--out", tmp_path / "d", "--model", "no-such-model")
    for args, message in [
        ((*SMALL, "--temperatures", "warm"), "`temperatures` is 'warm'"),
        ((*SMALL, "--invent", 2), "`invent` is 2"),
        ((*SMALL, "--answers", 0), "`answers` is 0"),
        ((*SMALL, "--prompts", tmp_path / "none"), "none, which cannot be read"),
        ((*SMALL, "--prompts", prompts), "no-such-model"),
    ]:
        done = run("data", *out, *args)
        assert done.exit_code == 2, done.output
        assert done.stdout == "" and done.stderr.count("\n") == 1
        assert message in done.stderr
    assert not (tmp_path / "d").exists()


def test_a_terminal_has_a_bar():
    shown = io.StringIO()
    with _progress(Console(file=shown, force_terminal=True, width=90)) as report:
        assert report is not None
        for done in (40, 90, 160):
            report(done, 160)
    for words in ("writing", "100%", "positions/s"):
        assert words in shown.getvalue()
    with _progress(Console(file=shown)) as report:
        assert report is None
