"""Prompts to train on: written from templates, unlike the held-out."""

import re
from collections import Counter

import pytest

from dspark_jax.evaluation.prompts import held_out
from dspark_jax.training import prompts as module
from dspark_jax.training.prompts import (
    DOMAINS,
    SLOT,
    builtin_prompts,
    templates,
)

# What the held-out prompts ask for, in their order.
HELD_OUT_FAMILIES = """
starred list, fill in a template, replace a word, sort lines, quote twice, bulleted
list, capital letters, two columns, chorus, notes as sentences, record with a change,
extend a pattern, correct spelling, reverse sentences, labels, chant,
web page, dockerfile, card style, backup script, create tables, translate code,
explain a line, docstring, makefile, regular expression, workflow, bank account,
decorator, data frame, component, command line tool,
continue a story, poem, speech, diary, film review, myth, farewell, describe by senses,
fable, monologue, rewrite in a style, back cover, toast, retell a tale, travel guide,
scene,
missing value of a mean, hypotenuse, binary, scale a recipe, dice, quadratic, median,
compound interest, triangle angle, least common multiple, end time, seating, ratio,
cylinder, rounding, two discounts,
neighbour, cook from what is there, planet, job interview, pet name, rainy day, plant,
foggy glasses, packing, birthday, instrument, who wrote, sleep, present, refuse,
language
"""
GRAM = 4


def _grams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9']+", text.lower())
    return {tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)}


@pytest.fixture(scope="module")
def prompts():
    return builtin_prompts(5000)


def test_there_are_thousands_all_different(prompts):
    texts = [prompt.prompt for prompt in prompts]
    assert len(set(texts)) == 5000
    assert [prompt.domain for prompt in prompts] == [*DOMAINS] * 1000
    assert not any(SLOT.search(text) for text in texts)


def test_order_is_a_function_of_the_seed(prompts, monkeypatch):
    assert builtin_prompts(40) == prompts[:40]
    assert builtin_prompts(40, seed=1) != prompts[:40]
    few = {domain: [("one", f"{domain} {{1-3}}")] for domain in DOMAINS}
    monkeypatch.setattr(module, "templates", lambda: few)
    with pytest.raises(ValueError, match="`count` is 99; the templates give 1[0-5]"):
        builtin_prompts(99)


def test_templates_are_many_and_take_turns(prompts):
    found = templates()
    families = [family for pairs in found.values() for family, _ in pairs]
    assert len(families) == len(set(families)) >= 150
    assert len({text for pairs in found.values() for _, text in pairs}) >= 150
    for domain, pairs in found.items():
        assert len(pairs) >= 30
        # As many prompts as templates: every template has its turn.
        texts = [p.prompt for p in prompts if p.domain == domain][: len(pairs)]
        for family, template in pairs:
            fixed = [re.escape(part) for part in SLOT.split(template)[::6]]
            shape = re.compile("an? ".join(".+".join(fixed).split(r"a\ ")), re.DOTALL)
            assert any(shape.fullmatch(text) for text in texts), family


def test_words_fill_the_slots(prompts):
    texts = [prompt.prompt for prompt in prompts]
    listed = [t for t in texts if t.startswith("Write these items as a numbered list")]
    assert listed
    for text in listed:
        words = text.split(": ")[1].rstrip(".").split(", ")
        assert len(set(words)) == 6
    # The same slot has one value.
    loops = [t for t in texts if "never stops" in t]
    assert all(len(set(re.findall(r"\d+", t)) - {"0"}) == 1 for t in loops) and loops
    assert not any(re.search(r"\ba (otter|owl|essay|electric)", t) for t in texts)
    assert any(re.search(r"\ban (otter|owl|octopus)", t) for t in texts)


def test_nothing_of_the_held_out_set_is_trained_on(prompts):
    kept = [text for texts in held_out().values() for text in texts]
    assert len(kept) == 80
    taboo = set().union(*map(_grams, kept))
    hits = Counter(gram for p in prompts for gram in _grams(p.prompt) & taboo)
    assert not hits, hits.most_common(5)
    # The measure sees a held-out prompt with other words in it.
    changed = "Plan a rainy Sunday for a family with three young children."
    assert _grams(changed) & taboo
    names = [name.strip() for name in HELD_OUT_FAMILIES.replace("\n", " ").split(",")]
    assert len(set(names)) == 80
    assert not set(names) & {f for pairs in templates().values() for f, _ in pairs}
