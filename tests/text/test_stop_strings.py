"""Stop strings: the boundary, what is held back, and independence of the cuts."""

import random

import pytest

from dspark_jax.text import StopMatch, StopMatcher


def run(stops, pieces) -> tuple[str, StopMatch | None]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.feed(piece) for piece in pieces)
    return text + matcher.finish(), matcher.match


def test_fr12_stop_string_completed_inside_a_block():
    matcher = StopMatcher(["ab"])
    shown = [matcher.feed(piece) for piece in ("x", "a", "b", "c")]
    assert shown == ["x", "", "", ""]
    # Text ends before the stop string; its own tokens are kept, the tail is not.
    assert matcher.match == StopMatch("ab", text_length=1, tokens=3)
    assert matcher.finish() == ""


def test_fr12_stop_string_in_the_middle_of_a_token():
    assert run(["ab"], ["xx", "yab!"]) == ("xxy", StopMatch("ab", 3, 2))


def test_fr12_tokens_without_text_count():
    # The first three tokens are parts of one character.
    pieces = ["", "", "😀", "s", "", "top"]
    assert run(["stop"], pieces) == ("😀", StopMatch("stop", 1, 6))


def test_text_is_held_back_only_while_it_can_match():
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.feed("Yes.\n") == "Yes."
    assert matcher.feed("\n") == ""
    assert matcher.feed("\n") == "\n"
    assert matcher.feed("Us") == ""
    assert matcher.feed("ual") == "\n\nUsual"
    assert matcher.match is None


def test_held_text_is_released_once_at_the_end():
    matcher = StopMatcher(["END"])
    assert matcher.feed("a EN") == "a "
    assert matcher.finish("\ufffd") == "EN\ufffd"
    assert matcher.finish() == ""
    assert matcher.match is None


def test_first_completed_then_longest():
    assert run(["abcd", "bc"], ["abcd"]) == ("a", StopMatch("bc", 1, 1))
    assert run(["c", "abc"], ["xabcd"]) == ("x", StopMatch("abc", 1, 1))
    assert run(["aab"], ["a"] * 3 + ["b"]) == ("a", StopMatch("aab", 1, 4))


def by_character(stops, text: str) -> tuple[str, str | None]:
    """The rule itself: after each character, does a stop string end here?"""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_result_does_not_depend_on_the_cuts():
    draw = random.Random(1)
    matched = 0
    for _ in range(3000):
        text = "".join(draw.choices("abc", k=draw.randint(1, 12)))
        stops = ["".join(draw.choices("abc", k=draw.randint(1, 4))) for _ in range(2)]
        pieces, rest = [], text
        while rest:
            size = draw.randint(0, 4)
            pieces.append(rest[:size])
            rest = rest[size:]
        shown, match = run(stops, pieces)
        expected, stop = by_character(stops, text)
        assert shown == expected
        assert (match.stop if match else None) == stop
        if match is not None:
            matched += 1
            kept = "".join(pieces[: match.tokens])
            end = match.text_length + len(match.stop)
            assert match.text_length == len(shown)
            assert len("".join(pieces[: match.tokens - 1])) < end <= len(kept)
    assert 1000 < matched < 3000


def test_no_stop_strings():
    assert run([], ["a", "b"]) == ("ab", None)


def test_one_string_is_one_stop_string():
    assert StopMatcher("ab").stops == ("ab",)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3]])
def test_bad_stop_strings_are_refused(stops):
    with pytest.raises(ValueError, match="`stop`"):
        StopMatcher(stops)
