"""Matchers through `generate`: masked text, rounds one by one, ends and errors."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax import SamplingParams
from dspark_jax.grammar import Grammars
from dspark_jax.models import dense
from dspark_jax.models.kv_cache import empty_cache
from dspark_jax.models.rows import dense_rows
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel
from dspark_jax.scheduling.policy import Budget
from tests.decoding.automata import Automaton, Counting
from tests.models.quick import quick_jit

PROMPTS, NEW, N = ["a", "hello there", "xyz" * 8], 20, 2
STOP = ord("}")


def some(first, last):
    return range(ord(first), ord(last) + 1)


def spelled(text):
    """One text and nothing else."""
    steps = {i: {token: i + 1} for i, token in enumerate(text.encode())}
    return Automaton({**steps, len(steps): {STOP: 0}}, 264, ends=(STOP,))


# Words of two letters from different halves, then a digit or an end after "z".
WORDS = Automaton(
    {
        0: dict.fromkeys(some("a", "m"), 1),
        1: dict.fromkeys(some("n", "y"), 2) | {ord("z"): 3},
        2: dict.fromkeys(some("0", "9"), 0),
        3: {STOP: 0} | dict.fromkeys(some("A", "C"), 0),
    },
    264,
    ends=(STOP,),
)
LETTERS = Automaton({0: dict.fromkeys(some("a", "z"), 0)}, 264)


def generate(model, prompts, **options):
    settings = dict(
        max_new_tokens=NEW, chat=False, draft_length=N,
        sampling=SamplingParams(stop_ids=(STOP,)),
    ) | options  # fmt: skip
    return dspark.generate(model, prompts, **settings)


@pytest.fixture(scope="module")
def reference(model):
    """reference(prompt, automaton): the plain loop, every text from its beginning."""
    config, width = model.spec.target, 64

    @quick_jit
    def last_row(params, tokens, length):
        cache = empty_cache(config, 1, width, jnp.dtype("float32"), False)
        zero = jnp.zeros((1,), jnp.int32)
        rows = dense_rows(tokens, length[None], zero)
        last = length[None] - 1
        logits, _, _ = dense.evaluate(config, params, cache, width, rows, (), last)
        return logits[0]

    def loop(prompt, automaton, count=NEW):
        line, out, state = list(prompt.encode()), [], 0
        while len(out) < count and STOP not in out:
            padded = np.zeros((1, width), np.int32)
            padded[0, : len(line)] = line
            row = last_row(model.params["target"], padded, np.int32(len(line)))
            allowed = np.ones(264, bool)
            if automaton is not None:
                allowed = automaton.allowed(state)
            token = int(np.where(allowed, np.asarray(row), -np.inf).argmax())
            state = automaton.steps[state][token] if automaton else 0
            line, out = [*line, token], [*out, token]
        return out

    return loop


def test_greedy_text_is_that_of_a_plain_masked_loop(model, reference, launched):
    grammars = [WORDS, None, LETTERS]
    matchers = [g and Counting(g, as_words=g is LETTERS) for g in grammars]
    outs = generate(model, PROMPTS, matchers=matchers)
    for prompt, out, grammar in zip(PROMPTS, outs, grammars, strict=True):
        assert out.tokens == reference(prompt, grammar)
    for matcher, out in zip(matchers, outs, strict=True):
        assert matcher is None or matcher.tokens == out.tokens
    # No round ahead of the one before it, whose drafts decide its masks.
    assert len(launched) == max(out.stats.rounds for out in outs)


def test_a_text_ends_where_its_grammar_does(model):
    """Also in a next turn, which begins a new grammar."""
    matchers = [Counting(spelled("cat")), Counting(spelled("a")), None]
    outs = generate(model, PROMPTS, matchers=matchers)
    assert [out.text for out in outs[:2]] == ["cat", "a"]
    assert [out.finish_reason for out in outs[:2]] == ["stop", "stop"]
    assert all(matcher.finished for matcher in matchers[:2])
    again = [Counting(spelled(text)) for text in ("dog", "b", "c")]
    states = [out.state for out in outs]
    outs = generate(model, ["?"] * 3, matchers=again, state=states)
    assert [out.text for out in outs] == ["dog", "b", "c"]


def test_a_stop_string_ends_a_guided_request(model, reference):
    free = bytes(reference(PROMPTS[0], LETTERS)).decode()
    stop = free[3:5]
    matchers = [Counting(LETTERS), None, Counting(LETTERS)]
    outs = generate(model, PROMPTS, matchers=matchers, stop=stop)
    assert outs[0].finish_reason == "stop_string"
    assert outs[0].text == free[: free.index(stop)]


def test_a_row_without_a_possible_token_is_an_error(model):
    dead = Automaton({0: {ord("a"): 1}, 1: {}}, 264)
    with pytest.raises(ValueError, match="matcher in place 1 allows no token"):
        generate(model, PROMPTS, matchers=[None, Counting(dead), None])
    # Ids that the model's padded vocabulary has and its target never says.
    never = Automaton({0: {200: 0}}, 264)
    with pytest.raises(ValueError, match=r"places \[2\] got logits without"):
        generate(model, PROMPTS, matchers=[None, None, Counting(never)])


@functools.cache
def costs():
    sizes = sorted({2, *(8 * (j + 1) for j in range(N + 1))})
    return CostModel(curve(sizes, [10.0, 10.5, 14.0, 15.0]), draft_ms=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_budget_keeps_to_the_grammar(model, reference, temperature):
    grammars = [WORDS, None, LETTERS]
    sampling = SamplingParams(temperature=temperature, seed=3, stop_ids=(STOP,))
    outs = generate(
        model, PROMPTS, matchers=[g and Counting(g) for g in grammars],
        policy=Budget(), costs=costs(), sampling=sampling, draft_length=None,
    )  # fmt: skip
    for prompt, out, grammar in zip(PROMPTS, outs, grammars, strict=True):
        assert grammar is None or grammar.accepts(out.tokens)
        assert temperature or out.tokens == reference(prompt, grammar)


@pytest.mark.slow
def test_shared_noise_has_one_text_at_every_length(model):
    texts = []
    for n in (0, 1, N):
        matchers = [Counting(g) for g in (WORDS, WORDS, LETTERS)]
        outs = generate(
            model, PROMPTS, matchers=matchers, draft_length=n,
            verification="shared_noise",
            sampling=SamplingParams(temperature=1.0, seed=5, stop_ids=(STOP,)),
        )  # fmt: skip
        texts.append([out.tokens for out in outs])
        assert all(WORDS.accepts(out.tokens) for out in outs[:2])
    assert all(a == b for a, b in itertools.pairwise(texts))
    assert jax.tree.leaves(texts)


def test_json_of_a_schema(model):
    """Through the grammar library; the model knows nothing, so all of it is forced."""
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    grammars = Grammars(model, stop_ids=(0,))
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    }
    matchers = [
        grammars.json_schema(schema), None, grammars.regex("(yes|no)[!?]"),
    ]  # fmt: skip
    outs = generate(
        model, PROMPTS, matchers=matchers, sampling=SamplingParams(stop_ids=(0,))
    )
    assert 1 <= json.loads(outs[0].text)["n"] <= 99
    assert outs[2].text in {a + b for a in ("yes", "no") for b in "!?"}
    assert [outs[i].finish_reason for i in (0, 2)] == ["stop", "stop"]
    assert matchers[0].finished and matchers[2].finished


def test_requests_that_join_bring_their_matchers(model, reference):
    """More prompts than places; texts end at different times, some are free."""
    prompts = ["a", "hello there", "bc", "xyz" * 8, "d"]
    grammars = [spelled("cat"), WORDS, None, spelled("a"), LETTERS]
    matchers = [g and Counting(g) for g in grammars]
    outs = generate(model, prompts, matchers=matchers, batch=2)
    for prompt, out, grammar in zip(prompts, outs, grammars, strict=True):
        assert out.tokens == reference(prompt, grammar)
