"""The host's time a round, from marks in a profiler's trace."""

import pytest

import dspark_jax as dspark
from scripts.host_trace import MARKS, per_round, read_marks, trace


def test_marks_add_up():
    # Results at 100, 200 and 350 us; what lies outside is left out.
    marks = {
        "wait": [(40.0, 60.0), (150.0, 50.0), (300.0, 50.0)],
        "choose": [(20.0, 10.0), (110.0, 20.0), (210.0, 30.0), (360.0, 9.0)],
        "launch": [(130.0, 10.0)],
    }
    means = per_round(marks)
    assert means["round"] == pytest.approx(0.125)
    assert means["wait"] == pytest.approx(0.05)
    assert means["choose"] == pytest.approx(0.025)
    assert means["launch"] == pytest.approx(0.005)
    assert means["text"] == pytest.approx(0.045)
    assert means["busy share"] == pytest.approx(0.6)
    with pytest.raises(ValueError, match="more tokens"):
        per_round({**marks, "wait": marks["wait"][:1]})


@pytest.mark.slow  # The profiler takes its time.
def test_every_round_of_a_run_is_marked(tmp_path):
    model = dspark.testing.tiny_model()
    options = dict(max_new_tokens=12, chat=False, draft_length=2)
    with pytest.raises(ValueError, match="no trace"):
        read_marks(tmp_path)
    means = trace(model, ["ab"], tmp_path, **options)
    marks = read_marks(tmp_path)
    rounds = dspark.generate(model, ["ab"], **options)[0].stats.rounds
    for name in MARKS:
        assert len(marks[name]) == rounds
    assert means["round"] > means["wait"] > 0
