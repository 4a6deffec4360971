"""Each lab in process; its tables are those of the page."""

import json
import re
from fractions import Fraction as F
from pathlib import Path

import pytest

from dspark_jax.tables import markdown_table
from scripts.labs import acceptance, gate

DATA = Path(__file__).parent / "data"
RULES = json.loads((DATA / "verification" / "one_position_exact.json").read_text())

PAGE = """\
| token | target | draft | standard | penalised | difference |
|---|---|---|---|---|---|
| A | 1/2 | 1/3 | 1/2 | 19/39 | -1/78 |
| B | 1/3 | 1/2 | 1/3 | 1/3 | 0 |
| C | 1/6 | 1/6 | 1/6 | 7/39 | 1/78 |"""


def run(lab, *arguments):
    lines = []
    lab.main(arguments, lines.append)
    return "\n".join(lines)


def test_tables():
    assert markdown_table(["a", "b"], [[1, "x"]]) == "| a | b |\n|---|---|\n| 1 | x |"
    with pytest.raises(ValueError, match="2 cells"):
        markdown_table(["a", "b"], [[1]])


def test_acceptance_prints_the_page(tmp_path):
    picture = tmp_path / "laws.svg"
    # Sixtieths hold 9/10 of the draft's sixths without rounding.
    out = run(acceptance, "--integer", "60", "--plot", str(picture))
    assert out.count(PAGE) == 2
    assert "standard equals the target row: True" in out
    assert "penalised obeys both bounds: True" in out
    for line in (
        "| A | 1/5 | 12/13 |",
        "| B | 0 | 0 |",
        "| C | 1/60 | 1/13 |",
        "standard test: 5/6",
        "residual mass: 47/60",
        "difference: 1/20",
        "grid: 3136, violations: 0",
        "epsilon 0.0000499988",
    ):
        assert line in out, line
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize("alpha", RULES["tables"])
def test_acceptance_at_other_penalties(alpha):
    table = RULES["tables"][alpha]
    p, q = (tuple(map(F, RULES[name])) for name in ("target", "draft"))
    assert acceptance.emitted(p, q, F(alpha)) == tuple(map(F, table["output"]))
    weights = acceptance.residual(p, q, F(alpha))
    assert weights == tuple(map(F, table["replacement_weight"]))
    assert acceptance.shares(weights) == tuple(map(F, table["replacement_prob"]))
    slack = F(table["epsilon"]) / (1 + F(table["epsilon"]))
    assert p[0] - slack == F(table["lower_bound"][0])


def test_bounds_are_reached_for_and_not_beyond():
    """A residual of alpha = 1/2 breaks the bounds of alpha = 9/10."""
    p, q = (tuple(map(F, RULES[name])) for name in ("target", "draft"))
    out = acceptance.emitted(p, q, F(1, 2))
    assert acceptance.obeys_bounds(p, out, F(1, 2))
    assert not acceptance.obeys_bounds(p, out, F(99, 100))
    for row in RULES["grid_summary"]["alphas"]:
        p, q = (tuple(map(F, law)) for law in row["largest_increase_pair"])
        change = [
            b - a
            for a, b in zip(p, acceptance.emitted(p, q, F(row["alpha"])), strict=True)
        ]
        assert max(change) == F(row["largest_increase"])


def test_integer_rows_of_other_totals_keep_the_target():
    p, q = (tuple(map(F, RULES[name])) for name in ("target", "draft"))
    for total in (6, 18):
        assert acceptance.integer_law(p, q, None, total) == p
    # Rounding moves the penalised law where sixths have no tenths.
    assert acceptance.integer_law(p, q, F(9, 10), 6) != acceptance.emitted(
        p, q, F(9, 10)
    )
    with pytest.raises(ValueError, match="multiples of 1/10"):
        acceptance.integer_law(p, q, None, 10)


def test_a_pair_without_rejection_needs_no_normalisation():
    out = run(acceptance, "--draft", "1/2,1/3,1/6", "--grid", "2", "--integer", "6")
    assert "nothing is replaced" in out
    rows = [line for line in out.splitlines() if line.startswith("| A | 1/2 | 1/2 |")]
    assert rows == ["| A | 1/2 | 1/2 | 1/2 | 1/2 | 0 |"] * 2


def test_acceptance_refuses_what_is_no_law(capsys):
    for arguments in (
        ["--target", "1/2,1/3"],
        ["--alpha", "0"],
        ["--draft", "1/2,1/2"],
        ["--integer", "0"],
    ):
        with pytest.raises(SystemExit):
            run(acceptance, *arguments)
    assert "sum to 1" in capsys.readouterr().err


@pytest.fixture(scope="module")
def gate_out(tmp_path_factory):
    picture = tmp_path_factory.mktemp("gate") / "speeds.png"
    out = run(gate, "--confidence", "2,2,0,0,-1", "--plot", str(picture))
    assert picture.stat().st_size > 1000
    return out


def test_gate_prints_table_and_fit(gate_out):
    for line in (
        "| < -0.5 | 20% | 5 |",
        "| 1.5 .. 3 | 89% | 19 |",
        "| > 6 | 100% | 36 |",
        "tokens: 191 + 109 t",
        "drafts: 300 + 109 n",
    ):
        assert line in gate_out, line


def test_gate_prints_decisions(gate_out):
    reference = json.loads((DATA / "scheduling" / "gate_decisions.json").read_text())
    for form, key in (
        ("published", "decision_histogram"),
        ("draft paid", "decision_histogram_when_skip_pays_draft"),
    ):
        counts = [reference[key].get(str(n), 0) for n in range(6)]
        assert f"| {form} | {' | '.join(map(str, counts))} |" in gate_out
    # The numbers of one block by hand: 1 + 0.89 + 0.7921 over 714 ms.
    assert "| 2 | 2.6821 | 714 | 3.7564 | 3.7564 |" in gate_out
    assert "| 0 | 1.0000 | 303 | 3.3003 | 2.0040 |" in gate_out


def test_gate_prints_reported_speeds_and_what_follows(gate_out):
    for line in (
        "| repeat | 5 | 5.76 | 5.76 | 4.44 | 4.41 |",
        "| code | 33/8 | 4.92 | 4.92 | 2.77 | 3.62 |",
        "| prose | 2 | 2.88 | 3.05 | 3.22 | 3.06 |",
        "| math | 7/8 | 1.80 | 2.45 | 3.15 | 4.15 |",
        "mean ratio 1.25",
    ):
        assert line in gate_out, line
    checks = dict(re.findall(r"^\| (.*?) \|.*\| (yes|no) \|$", gate_out, re.M))
    refuted = [name for name, verdict in checks.items() if verdict == "no"]
    assert set(refuted) & set(checks) == {
        "overall always, tokens by time",
        "math, recovered gap",
        "live: which prompt gets slower",
        "math, thresholded, if skips pay",
        "code, always beats plain: replay, live",
        # Rows of the table of thresholds.
        "repeat",
        "code",
    }
    assert checks["prose, recovered gap"] == "yes"
    assert (
        "| prose, thresholded, if skips pay | 3.59 | at most 4.20 | yes |" in gate_out
    )


def test_gate_decides_by_the_arguments():
    # One draft of 89 % in 605 ms is slower than a plain step, which here is no choice.
    arguments = ("--confidence", "2", "--plain-ms", "100", "--draft-ms", "0")
    out = run(gate, *arguments)
    assert "published: verify 0" in out
    out = run(gate, *arguments, "--floor", "1")
    assert "published: verify 1" in out
    with pytest.raises(SystemExit):
        run(gate, "--rates", "0.5,0.5")


def test_commands_of_the_document_do_what_it_says():
    text = (Path(__file__).parent.parent / "docs" / "labs.md").read_text()
    found = re.findall(r"python -m scripts\.labs\.acceptance (\S.*?)`?$", text, re.M)
    assert found == ["--alpha 99/100", "--target 1,0,0 --draft 1/2,1/2,0"]
    smaller, surprised = (run(acceptance, *line.split()) for line in found)
    # The direction of 9/10 and its bound, about a tenth as large.
    rows = [re.findall(r"^\| \w \|.*\| (\S+) \|$", smaller, re.M)[:3]]
    assert [F(x) for x in rows[0]] == [F(-1, 618), 0, F(1, 618)]
    assert "| A | 1 | 1/2 |" in surprised and "| B | 0 | 1/2 |" in surprised
    assert "own chance is 0 or 1: A, B" in surprised
