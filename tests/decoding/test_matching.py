"""The host's walk: what matchers are asked, and the masks that come of it."""

import itertools

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.masks import FREE, packed
from dspark_jax.decoding.matching import Guide, check_matchers
from tests.decoding.automata import Automaton, Counting

STOP, VOCAB = 9, 40
# Any of 1 to 3, then one below it or the end; token 5 is a dead end.
STEPS = {
    0: {1: 1, 2: 2, 3: 3, 5: 5},
    1: {STOP: 4},
    2: {1: 1, STOP: 4, 33: 0},
    3: {2: 2, 1: 1},
    4: {},
    5: {},
}
GRAMMAR = Automaton(STEPS, VOCAB, ends=(STOP,))


def guide_for(*matchers, drafts=3, stops=(STOP,), size=None):
    size = len(matchers) if size is None else size
    return Guide(matchers, [stops] * len(matchers), size, VOCAB, drafts)


def calls(matcher, name):
    return [what for kind, what in matcher.calls if kind == name]


def test_fr53_a_matcher_is_left_alone_behind_its_stop():
    """Block [token, STOP, x]: two steps, and no mask is asked for behind the stop."""
    matcher = Counting(GRAMMAR)
    guide = guide_for(matcher)
    guide.take([[3]])
    matcher.calls.clear()
    masks = guide.masks([[2, STOP, 1]], [True])
    guide.take([[2, STOP]])
    assert calls(matcher, "advance") == [2, STOP]
    assert calls(matcher, "rollback") == []
    # Rows of the first draft and of the stop; what lies behind is anything.
    assert calls(matcher, "allowed") == [1, 2]
    assert (masks[0, 2:] == FREE).all()
    assert matcher.finished and matcher.tokens == [3, 2, STOP]
    # `Counting` itself fails when it is asked behind its end; here is the control.
    with pytest.raises(AssertionError, match="behind the end"):
        matcher.allowed()


def test_a_stop_that_fell_leaves_nothing_behind():
    matcher = Counting(GRAMMAR)
    guide = guide_for(matcher)
    guide.take([[3]])
    guide.masks([[2, STOP, 1]], [True])
    guide.take([[2, 33]])
    assert matcher.tokens == [3, 2, 33] and calls(matcher, "rollback") == []
    guide.masks([[2, 1, STOP]], [True])
    guide.take([[1]])
    assert matcher.tokens == [3, 2, 33, 1] and calls(matcher, "rollback") == [2]


def reached(drafts):
    """States in front of each row that anything can be emitted from."""
    state = STEPS[0][3]
    yield state
    for draft in drafts:
        if draft == STOP or draft not in STEPS[state]:
            return
        state = STEPS[state][draft]
        yield state


@pytest.mark.parametrize("as_words", [False, True])
def test_every_row_has_the_mask_of_what_comes_before_it(as_words):
    for drafts in itertools.product([1, 2, 3, STOP, 33], repeat=3):
        matcher = Counting(GRAMMAR, as_words)
        guide = guide_for(matcher, size=2)
        assert (guide.first()[0] == packed(GRAMMAR.allowed(0))).all()
        guide.take([[3]])
        masks = guide.masks([list(drafts)], [True])
        states = list(reached(drafts))
        for row, state in enumerate(states):
            assert (masks[0, row] == packed(GRAMMAR.allowed(state))).all()
        assert (masks[0, len(states) :] == FREE).all() and (masks[1] == FREE).all()
        # Whatever stood: the matcher is where the text is.
        kept = len(states) - 1
        for stood in range(kept + 1):
            again = Counting(GRAMMAR, as_words)
            guide = guide_for(again)
            guide.take([[3]])
            guide.masks([list(drafts)], [True])
            (other, *_) = STEPS[states[stood]]
            guide.take([[*drafts[:stood], other]])
            assert again.tokens == [3, *drafts[:stood], other]


def test_free_and_ended_requests_are_not_asked():
    ended = Counting(GRAMMAR)
    guide = guide_for(None, ended)
    guide.take([[1], [1]])
    ended.calls.clear()
    masks = guide.masks([[1, 2, 3], [STOP, 2, 3]], [True, False])
    assert (masks == FREE).all() and ended.calls == []


def test_a_matcher_that_allows_nothing_is_an_error():
    guide = guide_for(Counting(GRAMMAR))
    # On the way it is none: the draft may fall.
    guide.take([[2]])
    masks = guide.masks([[33, 5, 1]], [True])
    assert not masks[0, 2].any()
    guide.take([[33, 5]])
    with pytest.raises(ValueError, match=r"allows no token; .* which are \[9\]"):
        guide.masks([[1, 2, 3]], [True])


def test_an_end_that_is_no_stop_id_is_an_error():
    guide = guide_for(Counting(GRAMMAR), stops=(8,))
    guide.take([[1]])
    guide.masks([[STOP, 1, 1]], [True])
    guide.take([[STOP]])
    with pytest.raises(ValueError, match=r"finished but .* runs on; .* are \[8\]"):
        guide.masks([[1, 2, 3]], [True])


def test_masks_and_steps_must_agree():
    class Liar(Counting):
        def allowed(self):
            return np.ones(VOCAB, bool)

    guide = guide_for(Liar(GRAMMAR))
    guide.take([[1]])
    with pytest.raises(ValueError, match="does not accept token 2, which it allowed"):
        guide.masks([[2, 1, 1]], [True])


@pytest.mark.parametrize(
    "mask", [np.ones(VOCAB + 1, bool), np.ones(2, np.int32), np.ones(3, np.uint32)]
)
def test_masks_of_another_size_are_refused(mask):
    class Wrong(Counting):
        def allowed(self):
            return mask

    wanted = r"must be bool\[40\] or uint32\[2\]"
    with pytest.raises(ValueError, match=wanted):
        guide_for(Wrong(GRAMMAR)).first()


def test_arguments_are_checked_before_anything_is_compiled(
    bytes_model, compile_counter
):
    matcher = Counting(GRAMMAR)
    compile_counter.restart()
    wrong = [
        ("p", "json", "is 'json'; allowed: a list"),
        ("p", matcher.allowed, "allowed: a list"),
        (["p", "x"], matcher, "allowed: a list"),
        (["p", "x"], [matcher], "1 entries for 2 prompts"),
        (["p", "x"], [matcher, matcher], "holds a matcher twice"),
        ("p", [object()], "`allowed`, `advance`"),
    ]
    for prompts, matchers, message in wrong:
        with pytest.raises(ValueError, match=message):
            dspark.generate(bytes_model, prompts, matchers=matchers)
    assert compile_counter.programs == []
    assert check_matchers(matcher, 1, single=True) == [matcher]
    assert check_matchers([None, matcher], 2, single=False) == [None, matcher]
