"""`eval` on a tiny model."""

import io
import json

import pytest
from rich.console import Console

from dspark_jax.cli.eval import show
from dspark_jax.evaluation.evaluate_plots import save_plots


@pytest.fixture
def pair(tiny):
    return ("--model", tiny / "target", "--draft", tiny / "draft")


def figures(**changed):
    """Figures of one domain as a report has them."""
    made = {
        "prompts": 2,
        "tokens": 20,
        "rounds": 8,
        "accepted_length": 2.25,
        "verify_rate": 0.75,
        "proposed": [8, 8],
        "conditional": [0.75, 2 / 3],
        "survival": [0.75, 0.5],
        "overlap": [0.71, 0.66],
        "expected_length": 2.17,
        "predicted": [0.8, None],
        "quality": {"ece": [0.05, 0.11], "auc": [0.83, None]},
        "sweep": [
            {"threshold": t, "drafts": d, "accepted_length": a, "verified_rows": d + 1,
             "verify_rate": a / (d + 1)}
            for t, d, a in ((0.0, 2.0, 2.25), (0.5, 1.0, 1.75))
        ],
    }  # fmt: skip
    return made | changed


@pytest.fixture
def report():
    greedy = figures(overlap=[], expected_length=None)
    return {
        "model": "tiny",
        "dtype": "float32",
        "draft_length": 2,
        "max_new_tokens": 10,
        "prompts": ["builtin", "gsm8k.jsonl"],
        "temperatures": [
            {"temperature": 0.0, "domains": {"math": greedy}, "overall": greedy,
             "speed_ratio": 1.25},
            {"temperature": 1.0, "domains": {"math": figures()}, "overall": figures(),
             "speed_ratio": None},
        ],
    }  # fmt: skip


def printed(report):
    shown = io.StringIO()
    show(report, Console(file=shown, width=100))
    return shown.getvalue()


def test_tables(report):
    text = printed(report)
    for part in ("builtin, gsm8k.jsonl", "temperature 0\n", "temperature 1\n"):
        assert part in text
    for part in ("2.25", "speed, drafts / plain: 1.25", "mean overlap", "2.17", "1.75"):
        assert part in text
    assert text.count("mean overlap") == text.count("speed, drafts") == 1
    assert text.count("calibration error") == 2 and "83" in text
    # A draft without a head has no thresholds and predicts nothing.
    for one in report["temperatures"]:
        one["overall"] |= {"sweep": [], "predicted": [], "quality": None}
    for part in ("threshold", "predicted", "calibration error"):
        assert part not in printed(report)


def test_errors_come_before_the_model_is_loaded(run, tmp_path):
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"body": 1}\n')
    for args, message in (
        (("--prompts", odd), "allowed: one of turns, question"),
        (("--prompts", "nowhere"), "nowhere"),
        (("--limit", 0), "`limit` is 0"),
        (("--temperature", -1), "`temperature` is -1"),
        (("--max-new-tokens", 0), "`max_new_tokens` is 0"),
    ):
        done = run("eval", "--model", tmp_path / "none", *args)
        assert done.exit_code == 2, done.output
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert message in done.stderr


def test_plots_need_matplotlib(run, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    done = run("eval", "--plot", tmp_path)
    assert done.exit_code == 2 and "dspark-jax[plot]" in done.stderr


def test_plots(report, tmp_path):
    pytest.importorskip("matplotlib")
    files = save_plots(report, tmp_path / "made")
    names = ["acceptance.png", "survival.png", "sweep.png"]
    assert sorted(f.name for f in (tmp_path / "made").iterdir()) == names
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    for one in report["temperatures"]:
        one["overall"] |= {"sweep": [], "predicted": []}
    assert [f.name for f in save_plots(report, tmp_path)] == ["acceptance.png"]


@pytest.mark.slow
def test_eval_reports_domains_and_temperatures(run, pair, tmp_path):
    prompts, file = tmp_path / "few.jsonl", tmp_path / "out.json"
    prompts.write_text('{"question": "Why?"}\n{"question": "How?"}\n')
    args = (*pair, "--max-new-tokens", 12, "--prompts", prompts, "--batch", 2)
    done = run("eval", *args, "--json", "--output", file, "--speed")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert json.loads(file.read_text()) == report
    assert report["prompts"] == ["few.jsonl"] and report["draft_length"] == 4
    assert [one["temperature"] for one in report["temperatures"]] == [0.0, 1.0]
    for one in report["temperatures"]:
        assert list(one["domains"]) == ["few"]
        assert one["domains"]["few"] == one["overall"]
        assert one["overall"]["prompts"] == 2 and one["speed_ratio"] > 0
        assert len(one["overall"]["sweep"]) == 11
        assert bool(one["overall"]["overlap"]) == (one["temperature"] == 1.0)
    assert "temperature 1" in printed(report)
    one = run("eval", *args, "--temperature", 0, "--draft-length", 1, "--limit", 1)
    assert one.exit_code == 0 and "1 drafts a round" in one.stdout
    assert run("eval", *pair[:2], *args[4:], "--draft", "none").exit_code == 2
