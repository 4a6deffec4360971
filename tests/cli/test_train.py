"""`train`: a draft for the tiny target on disk, in two sittings."""

import json

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.training.sequences import Sequences, write_sequences

RECIPE = """
steps = 4
sequences = 2
anchors = 3
warmup = 1
top = 4
soft_labels = true
average = 0.5

[draft]
layers = 1
block_size = 2
taps = [-1, 0]
markov_rank = 4
vocab_size = 256
"""


@pytest.fixture
def text(tmp_path):
    random = np.random.default_rng(0)
    tokens = random.integers(0, 250, (8, 24)).astype(np.int32)
    role = np.full((8, 24), 2, np.uint8)
    heat = np.resize(np.float32([0, 1]), 8)
    write_sequences(tmp_path / "text.npz", Sequences(tokens, role, heat))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "text.npz"


@pytest.mark.slow
def test_two_sittings_make_a_draft_that_generates(run, tiny, text, tmp_path):
    args = (
        "train", "--model", tiny / "target", "--data", text, "--run", tmp_path / "run",
        "--recipe", tmp_path / "recipe.toml", "--held-out", 2, "--out", tmp_path / "d",
    )  # fmt: skip
    first = run(*args, "--steps", 2, "--export")
    assert first.exit_code == 0, first.output
    assert first.stdout.splitlines()[0] == "2 of 2 steps done"
    second = run(*args, "--int8")
    assert second.exit_code == 0, second.output
    assert second.stdout.splitlines() == [
        "4 of 4 steps done",
        f"draft written to {tmp_path / 'd'}",
    ]
    settings = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert settings["config"]["steps"] == 4
    card = (tmp_path / "d" / "README.md").read_text()
    assert "4 of 4" in card and "8-bit" in card and "vanilla, rank 4" in card

    model = dspark.load(tiny / "target", tmp_path / "d")
    out = dspark.generate(model, "one", max_new_tokens=4, chat=False)
    plain = dspark.generate(model, "one", max_new_tokens=4, chat=False, draft_length=0)
    assert out.tokens == plain.tokens


def test_errors_are_one_line(run, tiny, text, tmp_path):
    args = ("train", "--model", tiny / "target", "--run", tmp_path / "run")
    for more, message in [
        (("--data", tmp_path / "none.npz"), "none.npz"),
        (("--data", text, "--recipe", tmp_path / "no.toml"), "cannot read"),
        (("--data", text, "--data-parallel", 99), "`devices` is (99, 1)"),
        (("--data", text, "--held-out", 8), "8 are held out"),
    ]:
        done = run(*args, *more)
        assert done.exit_code == 2, done.output
        assert done.stderr.count("\n") == 1 and message in done.stderr


@pytest.mark.slow
def test_features_first_then_training_on_two_devices(run, tiny, text, tmp_path):
    args = (
        "train", "--model", tiny / "target", "--data", text,
        "--recipe", tmp_path / "recipe.toml", "--held-out", 2,
        "--features", tmp_path / "features",
    )  # fmt: skip
    done = run(*args, "--run", tmp_path / "a", "--annotate")
    assert done.exit_code == 0, done.output
    marks = np.fromfile(tmp_path / "features" / "marks.bin", np.uint32)
    assert (marks != 0).all() and len(marks) == 8
    for split in ("--data-parallel", "--tensor-parallel"):
        done = run(*args, "--run", tmp_path / split, split, 2)
        assert done.exit_code == 0, done.output
