"""`calibrate` as a command."""

import importlib.util
import io
import json
import sys

import numpy as np
import pytest
from rich.console import Console

from dspark_jax.checkpoint import native
from dspark_jax.cli.calibrate import show
from dspark_jax.scheduling.diagrams import draw_reliability

TEXTS = ["red", "green", "blue", "white"]


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    fields = ("prompt", "question", "prompt", "problem")
    lines = [
        json.dumps({field: text, "id": 3})
        for field, text in zip(fields, TEXTS, strict=True)
    ]
    file.write_text("\n".join([*lines, "", ""]))
    return file


def test_errors_come_before_the_decoding(run, tiny, prompts, tmp_path, monkeypatch):
    pair = ("--model", tiny / "target", "--prompts", prompts)
    draft = ("--draft", tiny / "draft")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    wrong = [
        (*pair, *draft, "--plot", tmp_path / "plots"),
        (*pair, "--write"),
        (*pair, "--draft", tiny / "target", "--write"),
        (*pair, *draft, "--holdout", "2"),
        (*pair, *draft, "--limit", "1"),
        (*pair, *draft, "--temperature", "-1"),
        (*pair, "--draft", "none"),
    ]
    words = (
        "dspark-jax[plot]",
        "--draft",
        "convert",
        "holdout",
        "`limit` is 1; allowed: None or an int >= 2",
        "temperature",
        "draft",
    )
    for args, word in zip(wrong, words, strict=True):
        done = run("calibrate", *args)
        assert done.exit_code == 2, done.output
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert word in done.stderr
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize("shifts", [None, [-0.4]])
def test_report_is_a_table(shifts):
    row = {"count": [40], "ece": [0.1], "noise": [0.02], "brier": [0.2], "auc": [None],
           "prediction": [0.5], "label": [0.4]}  # fmt: skip
    overall = {name: column[0] for name, column in row.items() if name != "count"}
    after = {**row, "ece": [0.03], "overall": {**overall, "ece": 0.03}}
    report = {
        "model": "m", "dtype": "float32", "calibrated_at": 0.7, "notes": ["a note"],
        "counts": {"fit_rounds": 100, "fit_prompts": 3, "evaluation_rounds": 40,
                   "evaluation_prompts": 1},
        "temperatures": [2.5], "shifts": shifts, "after": after,
        "before": {**row, "overall": overall},
        "written": True,
        "choice": shifts and {"kind": "shifts", "errors": {"identity": 0.1234}},
    }  # fmt: skip
    out = io.StringIO()
    show(report, Console(file=out, width=80))
    text = out.getvalue()
    for part in ("temperature 0.7", "2.5", "0.100", "0.030", "0.400", "note: a note"):
        assert part in text
    assert "stored with the draft" in text
    assert ("-0.4" in text) == ("chosen: shifts" in text) == (shifts is not None)
    assert ("identity 0.123" in text) == (shifts is not None)


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)
@pytest.mark.parametrize("kind", ["svg", "png"])
def test_diagrams_are_small_and_repeatable(tmp_path, rng, kind):
    survival = np.cumprod(rng.random((500, 7)), 1)
    labels = (rng.random((500, 7)) < survival).astype(float)
    proposed = np.broadcast_to(np.arange(7) < 6, labels.shape)
    files = [tmp_path / f"{i}.{kind}" for i in range(2)]
    for file in files:
        draw_reliability(file, survival, labels, proposed=proposed, title="a title")
    assert files[0].read_bytes() == files[1].read_bytes()
    assert 5_000 < files[0].stat().st_size < 200_000
    if kind == "svg":
        assert "a title" in files[0].read_text()


@pytest.mark.slow
def test_calibrate_writes_temperatures(run, tiny, prompts, tmp_path):
    draft = tmp_path / "draft"
    draft.mkdir()
    for file in (tiny / "draft").iterdir():
        (draft / file.name).write_bytes(file.read_bytes())
    args = ("--model", tiny / "target", "--draft", draft, "--prompts", prompts)
    small = ("--max-new-tokens", 6, "--batch", 1, "--no-chat")
    output = tmp_path / "out.json"
    done = run("calibrate", *args, *small, "--write", "--json", "--output", output)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert json.loads(output.read_text()) == report
    config = native.read_native_config(draft)
    assert list(config.confidence_temperatures or ()) == report["temperatures"]
    assert config.calibrated_at == report["calibrated_at"] == 0.0
    shifts = config.confidence_shifts
    assert (None if shifts is None else list(shifts)) == report["shifts"]
    assert report["choice"]["kind"] in ("identity", "temperatures", "shifts")
    assert report["counts"]["fit_prompts"] == 3 and report["written"]
    # The draft with temperatures loads and decodes.
    again = run("calibrate", *args, *small, "--no-shift")
    assert again.exit_code == 0 and "stood" in again.stdout
    assert "chosen" not in again.stdout
    assert native.read_native_config(tiny / "draft").confidence_temperatures is None
