"""The pure parts of `scripts/bench_others.py`."""

import pytest

from scripts.others.summary import Turn, figures, rate, rotated, until_stop


def test_every_way_has_every_place_once():
    ways = ["a", "b", "c"]
    orders = [rotated(ways, turn) for turn in range(len(ways))]
    assert orders[0] == ways
    for way in ways:
        assert sorted(order.index(way) for order in orders) == [0, 1, 2]
    assert rotated(ways, 3) == ways


def test_cut_behind_the_first_stop_token():
    assert until_stop([5, 2, 7, 2], {2}, 9) == [5, 2]
    assert until_stop([5, 6, 7], {2}, 2) == [5, 6]
    # The stop token beyond the limit is not there.
    assert until_stop([5, 6, 2], {2}, 2) == [5, 6]
    assert until_stop([], {2}, 2) == []


def test_rate_adds_before_it_divides():
    slow = Turn("code", (1, 2, 3), 1, 2.0)
    fast = Turn("math", tuple(range(13)), 3, 1.0)
    # 2 + 10 tokens in 3 seconds; the mean of the two rates would be 5.5.
    assert rate([slow, fast]) == pytest.approx(4.0)


def test_rate_leaves_out_what_has_no_time():
    only_first = Turn("code", (1, 2), 2, 0.0)
    assert rate([only_first]) is None
    assert rate([]) is None
    assert rate([only_first, Turn("code", (1, 2), 1, 0.5)]) == pytest.approx(2.0)


def test_figures_beside_another_way():
    base = [Turn("code", (1, 2, 3), 1, 1.0), Turn("math", (4, 5, 6), 1, 1.0)]
    mine = [Turn("code", (1, 2, 3), 1, 0.5), Turn("math", (4, 5, 7), 1, 0.25)]
    found = figures(mine, base)
    assert found["tokens_per_second"] == pytest.approx(4 / 0.75)
    assert found["ratio"] == pytest.approx(2 / 0.75)
    assert found["same_tokens"] == 1
    assert (found["prompts"], found["tokens"]) == (2, 6)
    assert found["domains"] == pytest.approx({"code": 4.0, "math": 8.0})
    with pytest.raises(ValueError, match="shorter|longer"):
        figures(mine, base[:1])
