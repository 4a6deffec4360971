"""`dspark-jax replay` on a recording made by hand."""

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from dspark_jax.cli.main import app
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel
from dspark_jax.scheduling.replay import Recording, load_recording, save_recording


@pytest.fixture
def log(tmp_path):
    """Four rounds of one request: two drafts stand where the head is sure."""
    path = tmp_path / "rounds.jsonl"
    logits = np.asarray([[4.0, 4.0], [-4.0, -4.0]] * 2, np.float32)
    costs = CostModel(curve([2, 3], [10.0, 12.0]), draft_ms=2.0)
    recording = Recording(
        np.arange(4, dtype=np.int32)[:, None],
        logits[:, None],
        np.asarray([2, 0, 2, 0], np.int32)[:, None],
        np.ones((4, 1), bool),
        costs.table(1),
    )
    save_recording(path, recording)
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_figures_of_every_fixed_length_and_a_threshold(log):
    out = run(log, "--policy", "fixed", "--policy", "threshold", "--json")
    assert out.exit_code == 0, out.output
    scores = json.loads(out.stdout)
    assert list(scores) == ["fixed 0", "fixed 1", "fixed 2", "Threshold"]
    tokens = [one["tokens"] for one in scores.values()]
    assert tokens == [4, 6, 8, 8]
    times = [one["milliseconds"] for one in scores.values()]
    assert times == [40, 48, 56, 52]
    assert scores["Threshold"]["verified"] == 1


def test_calibrated_confidences_unless_raw(log):
    stored = load_recording(log)
    fit = dict(temperatures=(1.0, 1.0), shifts=(-9.0, -9.0))
    save_recording(log, dataclasses.replace(stored, **fit))
    for options, verified in (((), 0), (("--raw",), 1)):
        out = run(log, "--policy", "threshold", "--json", *options)
        assert out.exit_code == 0, out.output
        assert json.loads(out.stdout)["Threshold"]["verified"] == verified


def test_a_table(log):
    out = run(log, "--policy", "fixed")
    assert out.exit_code == 0 and "fixed 2" in out.stdout


def test_errors_in_one_line(log, tmp_path):
    for arguments, word in (
        ([log, "--policy", "best"], "allowed"),
        ([tmp_path / "none.jsonl"], "cannot read"),
    ):
        out = run(*arguments)
        assert out.exit_code == 2 and word in out.output
        assert len(out.output.strip().splitlines()) == 1
