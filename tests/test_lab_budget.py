"""The budget lab in process; its tables are those of the page."""

import json
import re
from fractions import Fraction as F
from pathlib import Path

import pytest

from scripts.labs import budget

FOLDER = Path(__file__).parent / "data" / "scheduling"

PAGE = """\
| positions | graph | expected | time | output/time |
|---|---|---|---|---|
| 2 | 2 | 2.00 | 10 | 0.2000 |
| 3 | 4 | 2.90 | 12 | 0.2417 |
| 4 | 4 | 3.70 | 12 | 0.3083 |
| 5 | 6 | 4.42 | 14 | 0.3157 |
| 6 | 6 | 4.82 | 14 | 0.3443 |
| 7 | 8 | 5.18 | 30 | 0.1727 |
| 8 | 8 | 5.28 | 30 | 0.1760 |
chosen total 6, from the older confidences alone
lengths from the newer confidences [2, 4]
lengths from the older confidences [3, 3]"""


def run(*arguments):
    lines = []
    budget.main(arguments, lines.append)
    return "\n".join(lines)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    picture = tmp_path_factory.mktemp("budget") / "scores.svg"
    text = run("--plot", str(picture))
    assert "<svg" in picture.read_text()
    return text


def test_staircase(out):
    assert PAGE in out
    assert "cumulative 0.9, 0.72, 0.36 / 0.8, 0.4, 0.1" in out


def test_curves(out):
    for line in (
        "| flat | 2:10,4:10,6:10,8:10 | 8 | [4, 4] | [4, 4] |",
        "| stairs | 2:8,4:10,6:12,8:28 | 6 | [2, 4] | [3, 3] |",
        "| steep | 2:8,4:10,6:22,8:38 | 4 | [1, 3] | [2, 2] |",
        "| steep, second graph 5 | 2:8,5:10,6:22,8:38 | 5 | [1, 4] | [3, 2] |",
    ):
        assert line in out, line


def test_times_and_device(out):
    assert "timings 9, 10, 11, 12, 40 trim to 11" in out
    assert "10 at 6 positions, slope 0.5, sampler 2: 15" in out
    assert "| 7 | [3, 1, 3] | [3, 3, 1] | 7 | 7 |" in out
    assert "| 8 | [3, 2, 3] | [3, 3, 2] | 8 | 8 |" in out


def test_throughput(out):
    rows = json.loads((FOLDER / "reported_throughput.json").read_text())["rows"]
    assert len(rows) == 6
    for row in rows:
        cells = [
            row[key] for key in ("concurrency", "fixed", "dynamic", "gain_printed")
        ]
        assert f"| {' | '.join(map(str, cells))} |" in out
        assert F(row["dynamic"] - row["fixed"], row["fixed"]) == F(row["gain"])


@pytest.mark.parametrize(
    ("slope", "total"), [("0.5", 6), ("2", 6), ("5", 4), ("-3", 6)]
)
def test_a_larger_slope_chooses_fewer(slope, total):
    text = run("--slope", slope)
    assert f"chosen total {total}," in text
    if slope == "5":
        # 12 + 5 * 4, the graph, and not 5 * 3, the positions.
        assert "| 3 | 4 | 2.90 | 32 |" in text


def test_the_total_is_of_the_older_confidences(out):
    text = run("--newer", "0.9,0.8,0.5", "0.8,0.5,0.25")
    assert "lengths from the newer confidences [3, 3]" in text
    table = [
        line for line in out.splitlines() if line.startswith("| ") and "0." in line
    ]
    assert all(line in text for line in table if ":" not in line)
    assert "chosen total 6," in text


def test_a_budget_beyond_the_positive_values():
    text = run("--total", "8")
    assert "drafts with a positive value: 4" in text
    # The first zero in flat order is the second request's.
    assert "| 8 | [3, 2, 3] |" in text


def test_arguments_are_checked():
    for arguments in (
        ["--older", "0.9", "0.9,0.8"],
        ["--newer", "1.2"],
        ["--remap", "0,2"],
    ):
        with pytest.raises(SystemExit):
            run(*arguments)


def test_commands_of_the_document_run():
    text = (FOLDER.parent.parent.parent / "docs" / "labs.md").read_text()
    found = re.findall(r"python -m scripts\.labs\.budget (\S.*?)`?$", text, re.M)
    assert len(found) == 3
    assert "chosen total 4," in run(*found[0].split())
    assert "newer confidences [3, 3]" in run(*found[1].split())
    assert "[3, 2, 3]" in run(*found[2].split())
