"""Held-out prompts, and the arithmetic of the comparison."""

import re

import pytest

from dspark_jax.evaluation import DOMAINS, held_out, random_prompts
from dspark_jax.evaluation.compare import Pair, Settings, compare, summarise
from dspark_jax.results import Result, Stats
from dspark_jax.testing import byte_tokenizer, tiny_model

# Families of the shipped drafts' training prompts.
TRAINED_ON = re.compile(
    r"^(count|what is \d+ (\+|times)|list the (months|even|multiples)|repeat the word"
    r"|write the (sentence|alphabet|multiplication)|solve for x|what is \d+ percent"
    r"|write an? (\w+|c\+\+) (function|program) that|fix this code|show me a class"
    r"|tell me a bedtime story|write the opening of|how does .* work"
    r"|explain .* in simple terms|give me (five|some)|list ten facts)",
    re.IGNORECASE,
)


def test_prompts_are_many_different_and_held_out():
    prompts = held_out()
    assert tuple(prompts) == DOMAINS
    assert all(len(texts) >= 15 for texts in prompts.values())
    every = [text for texts in prompts.values() for text in texts]
    assert len(set(every)) == len(every)
    assert [text for text in every if TRAINED_ON.search(text)] == []
    assert TRAINED_ON.search("Write a C++ function that reverses a string.")
    assert {len(texts) for texts in held_out(2).values()} == {2}
    for count in (0, 1000):
        with pytest.raises(ValueError, match="`prompts`"):
            held_out(count)


def test_random_prompts_can_be_encoded_and_are_seeded():
    tokenizer = byte_tokenizer()
    first, second = random_prompts(tokenizer, 2, tokens=20)
    assert first != second and len(tokenizer.encode(first)) == 20
    assert random_prompts(tokenizer, 2, tokens=20) == [first, second]


def _result(tokens: int, rounds: int, rate: float, acceptance: tuple) -> Result:
    stats = Stats(rounds, tokens, 0, 0, 0.0, acceptance, rate)
    return Result("", list(range(tokens)), "length", None, stats, None)  # type: ignore


def test_summary_adds_times_before_dividing():
    pairs = [
        Pair("a", "", _result(11, 10, 10.0, ()), _result(11, 5, 20.0, (0.6, 0.4))),
        Pair("a", "", _result(31, 30, 60.0, ()), _result(31, 20, 60.0, (0.5, 0.0))),
    ]
    total = summarise(pairs)
    # 40 tokens in 1.5 s without drafts, in 1 s with them. The mean of the two
    # rates, 35, would be wrong.
    assert total.plain == pytest.approx(40 / 1.5)
    assert total.speculative == pytest.approx(40.0)
    assert total.ratio == pytest.approx(1.5)
    assert total.accepted_length == pytest.approx(40 / 25)
    assert total.acceptance == pytest.approx((13 / 25, 2 / 25))
    assert total.identical == 2


@pytest.mark.slow
def test_turns_alternate_and_pieces_are_heard():
    model, heard = tiny_model(), []
    prompts = {"a": ["xy", "yx"], "b": ["zz"]}
    settings = Settings(4, 5, chat=False)
    pairs = list(
        compare(
            model,
            prompts,
            settings,
            listener=lambda domain, prompt: lambda piece: heard.append(piece.tokens),
        )
    )
    assert [(p.domain, p.prompt) for p in pairs] == [
        ("a", "xy"),
        ("b", "zz"),
        ("a", "yx"),
    ]
    assert all(pair.identical for pair in pairs)
    drafted = [p.speculative.tokens for p in pairs if p.speculative]
    assert sum(heard, []) == sum(drafted, [])
