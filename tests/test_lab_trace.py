"""The lab that follows a proposal: what it prints is what the rounds did."""

import itertools
import re
from fractions import Fraction as F
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel
from pallas_kernels import TOTAL
from scripts.labs import trace

LAWS = (F(1, 2), F(1, 3), F(1, 6)), (F(1, 3), F(1, 2), F(1, 6))
TARGET, DRAFT = (np.asarray([float(x) for x in law]) for law in LAWS)
CONFIDENCE = (1.0, 2.0, -1.0)
COSTS = CostModel(curve([2, 3, 4], [10.0, 12.0, 14.0])).table(1)


@pytest.fixture(scope="module")
def model():
    return trace.model_of(*LAWS, CONFIDENCE, 3)


@pytest.fixture(scope="module")
def ways(model):
    """The first three proposals of a request."""
    return [trace.follow(model, COSTS, 0, rounds) for rounds in range(3)]


def told(found, followed):
    """The text, and the cells of both tables."""
    lines = []
    trace.report(found, followed, lines.append)
    text = "\n".join(lines)
    tables = [
        [line.strip("| ").split(" | ") for line in part.splitlines()]
        for part in re.findall(r"(?:^\| \d.*\n)+", text, re.M)
    ]
    return text, *tables


@pytest.mark.slow
def test_every_proposal_is_the_one_that_the_round_before_left(ways):
    for one, following in itertools.pairwise(ways):
        for name in ("ids", "weights", "offset", "confidence", "generation"):
            left = getattr(one.after.proposal, name)
            np.testing.assert_array_equal(
                left, getattr(following.before.proposal, name)
            )
        assert one.after.anchor == following.before.anchor


@pytest.mark.slow
@pytest.mark.parametrize("followed", range(3))
def test_what_is_printed_is_what_was_published(ways, followed):
    found = ways[followed]
    text, made, verified = told(found, followed)
    generation = int(found.before.proposal.generation[0])
    assert f"end of round {followed}: generation {generation}." in text
    positions = [int(row[0]) for row in made]
    assert positions == [generation, generation + 1, generation + 2]
    # The stored row is the draft's law, and the point lies in the id's interval.
    survival = 1.0
    anchor = int(found.before.anchor[0])
    for _, name, row, offset, logit, alive in made:
        weights = [int(w) for w in row.split()]
        assert sum(weights) == TOTAL
        np.testing.assert_allclose(np.divide(weights, TOTAL), DRAFT, atol=1e-6)
        assert 0 <= int(offset) < weights["ABC".index(name)]
        # The head knows the token before.
        assert float(logit) == CONFIDENCE[anchor]
        survival /= 1 + np.exp(-CONFIDENCE[anchor])
        assert float(alive) == pytest.approx(survival, abs=1e-4)
        anchor = "ABC".index(name)

    assert len(verified) == found.lengths == found.out.drafted[0] + 1
    said = []
    for _, draft, q, offset, p, verdict, token in verified[:-1]:
        assert verdict == ("stands" if int(offset) < int(p) else "falls")
        target = TARGET["ABC".index(draft)] * TOTAL
        assert abs(int(p) - target) < 1000 and int(offset) < int(q)
        said.append((verdict, draft if verdict == "stands" else token))
    assert verified[-1][-2] == "fresh"
    np.testing.assert_allclose(
        np.divide([int(w) for w in verified[-1][4].split()], TOTAL), TARGET, atol=1e-6
    )
    # Up to the first that fell, or the fresh token behind them all.
    kept = len(list(itertools.takewhile(lambda one: one[0] == "stands", said)))
    said.append(("fresh", verified[-1][-1]))
    emitted = [token for _, token in said[: kept + 1]]
    assert f"4. Published: {' '.join(emitted)}." in text
    assert f"{kept} of {found.out.drafted[0]} drafts stood" in text
    committed = generation + len(emitted)
    assert f"Committed tokens: {generation}, now {committed}." in text
    assert f"5. Replaced by the proposal of generation {committed}:" in text


@pytest.mark.slow
def test_a_total_is_older_than_what_it_divides(ways):
    first, *later = (told(found, at)[0] for at, found in enumerate(ways))
    assert "none was older, survivals count as 1" in first and "4 of 4 rows" in first
    for at, text in enumerate(later):
        old = int(ways[at].before.proposal.generation[0])
        new = int(ways[at + 1].before.proposal.generation[0])
        assert f"The total is of generation {old}:" in text and old < new
        assert f"division is of generation {new}, this one" in text
    for found in ways:
        assert found.lengths == found.total


@pytest.mark.slow
def test_the_command_of_the_document(capsys):
    text = (Path(__file__).parents[1] / "docs" / "labs.md").read_text()
    assert "python -m scripts.labs.trace --follow 0" in text
    trace.main(["--follow", "0", "--ms", "10,12"])
    out = capsys.readouterr().out
    assert "Completed by: prefill ends" in out
    assert [line[0] for line in out.splitlines() if line[1:3] == ". "] == list("12345")


def test_arguments_are_checked(capsys):
    for arguments in (
        ["--target", "1/2,1/2"],
        ["--ms", "10,0"],
        ["--follow", "-1"],
        ["--draft", "1/2,1/3,1/3"],
    ):
        with pytest.raises(SystemExit):
            trace.main(arguments)
    assert "different lengths" in capsys.readouterr().err
