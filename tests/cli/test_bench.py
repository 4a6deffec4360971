"""`bench` and `demo` on a tiny model."""

import io
import json

import pytest
from rich.console import Console

from dspark_jax.cli.bench import show

TINY = ("--max-new-tokens", 6)


@pytest.fixture
def pair(tiny):
    return ("--model", tiny / "target", "--draft", tiny / "draft")


@pytest.mark.slow
def test_fr28_random_prompts_are_labelled(run, pair, tmp_path):
    file = tmp_path / "out.json"
    args = (*pair, *TINY, "--random-prompts", "--prompts", 1)
    done = run("bench", *args, "--json", "--output", file)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert json.loads(file.read_text()) == report
    assert report["prompt_source"] == "random tokens"
    assert report["note"] == "acceptance not representative"
    assert "accepted" not in done.stdout and 'acceptance"' not in done.stdout
    assert report["overall"]["plain_tokens_per_second"] > 0

    shown = io.StringIO()
    show(report, Console(file=shown, width=100))
    assert "random tokens: acceptance not representative" in shown.getvalue()
    assert "accepted" not in shown.getvalue()
    # The control: the same report with a prompt set that means something.
    report["overall"] |= {"accepted_length": 1.5, "acceptance": [0.5]}
    report["domains"] = {}
    show(report, Console(file=shown, width=100))
    assert "accepted" in shown.getvalue()


@pytest.mark.slow
def test_bench_reports_acceptance_and_times(run, pair):
    args = (*pair, *TINY, "--prompts", 1)
    report = json.loads(run("bench", *args, "--json").stdout)
    assert report["prompt_source"] == "held-out set" and "note" not in report
    assert list(report["domains"]) == ["repeat", "code", "prose", "math", "chat"]
    overall = report["overall"]
    assert overall["identical"] == overall["prompts"] == 5
    assert len(overall["acceptance"]) == report["draft_length"] == 4
    # What is accepted by position adds up to the length, less the bonus token.
    assert overall["accepted_length"] >= 1
    assert set(report["versions"]) == {"python", "jax", "jaxlib", "flax"}
    assert report["hardware"]["cores"] >= 1

    time = report["time"]
    assert {one["draft_length"] for one in time["programs"]} == {0, 4}
    for one in time["programs"]:
        assert 0 < one["round_ms_best"] <= one["round_ms"]
        # A difference of two medians, which may come out below 0.
        assert one["gap_ms"] == pytest.approx(
            one["round_ms"] - one["device_ms"], abs=0.01
        )
        assert 0 < one["step_ms"] and 0 < one["call_ms"] <= one["host_ms"] * 2
        assert one["host_ms"] <= one["round_ms"]
    assert time["share_of_bound"] == pytest.approx(
        time["bound_ms"] / min(p["device_ms"] for p in time["programs"]
                               if p["draft_length"] == 0)
    )  # fmt: skip


@pytest.mark.slow
def test_bench_and_demo_without_a_draft(run, tiny):
    plain = ("--model", tiny / "target", *TINY)
    done = run("bench", *plain, "--prompts", 1)
    assert done.exit_code == 0 and "plain decoding only" in done.stdout
    done = run("demo", *plain)
    assert done.exit_code == 0, done.output
    assert "no draft" in done.stdout and "identical" not in done.stdout


@pytest.mark.slow
def test_demo_checks_that_tokens_are_identical(run, pair):
    done = run("demo", *pair, *TINY)
    assert done.exit_code == 0, done.output
    assert "Tokens were identical to plain decoding" in done.stdout
    for domain in ("repeat", "code", "prose", "math", "chat"):
        assert f"[{domain}]" in done.stdout


def test_bench_errors(run, pair):
    for args in (("--prompts", 0), ("--draft-length", 9), ("--temperature", -1)):
        done = run("bench", *pair, *args)
        assert done.exit_code == 2
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
