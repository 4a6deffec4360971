"""The target against both reference implementations, layer by layer, step by step."""

import dataclasses
import functools

import numpy as np
import pytest

from dspark_jax.models.params import flatten, unflatten
from tests.deepseek_v4.goldens import LIMIT, Runner, arrays, difference, target

# Prompts go in pieces of this size, so that few programs are compiled.
PIECE = 16


def feed_all(runner, ids):
    """(logits, stream means) of all tokens, in padded pieces."""
    parts = [
        runner.feed(ids[at : at + PIECE], PIECE) for at in range(0, len(ids), PIECE)
    ]
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


@pytest.fixture(scope="module")
def prompt():
    return arrays("hf_prefill")["prompt_a"]


def test_prompts(prompt):
    gold = arrays("hf_prefill")
    logits, means = feed_all(Runner(), prompt)
    assert difference(logits, gold["a.logits"]) <= LIMIT
    at = gold["a.positions"]
    hidden = gold["a.hidden"].mean(axis=2).transpose(1, 0, 2)
    assert difference(means[at], hidden) <= LIMIT
    logits, means = feed_all(Runner(), gold["prompt_b"])
    assert difference(logits, gold["b.logits"]) <= LIMIT
    last = gold["b.hidden_last"].mean(axis=1)
    assert difference(means[-1], last) <= LIMIT


def test_steps_and_blocks(prompt):
    """One token at a time, and six at once across all kinds of boundaries."""
    gold = arrays("hf_decode")
    runner, length = Runner(), int(gold["prefill_len"])
    assert difference(feed_all(runner, prompt[:length])[0], gold["prefill_logits"]) <= (
        LIMIT
    )
    for step, want in enumerate(gold["decode_logits"]):
        logits, _ = runner.feed(prompt[length + step :][:1], 6)
        assert difference(logits[0], want) <= LIMIT, step
    for start in (13, 21, 30):
        runner = Runner()
        feed_all(runner, prompt[:start])
        logits, _ = runner.feed(prompt[start : start + 6])
        assert difference(logits, gold[f"chunk_{start}.logits"]) <= LIMIT


def test_greedy_text(prompt):
    gold = arrays("hf_decode")
    runner = Runner()
    logits, _ = feed_all(runner, prompt[: int(gold["prefill_len"])])
    for want in gold["greedy_tokens"]:
        token = int(logits[-1].argmax())
        assert token == want
        logits, _ = runner.feed([token], 6)


def test_states(prompt):
    """Windows, raw rows and entries after a prompt and after single steps."""
    gold = arrays("native_state")
    runner = Runner()
    feed_all(runner, prompt[:13])
    check_state(runner, gold, "after_prefill.", slice(None))
    row = {int(step): i for i, step in enumerate(gold["steps.at"])}
    for step in range(20):
        _, means = runner.feed(prompt[13 + step :][:1], 6)
        if step < 8:
            main = means[0, 3:6].reshape(-1)
            assert difference(main, gold["decode_main_hidden"][step]) <= LIMIT
        if step in row:
            check_state(runner, gold, "steps.", row[step])


def check_state(runner, gold, prefix, at):
    """Compares what is committed with the reference's rings and accumulators."""
    state, n = runner.host_state(), runner.length
    for layer, ratio in ((0, 0), (2, 4), (3, 16)):
        own, name = state[str(layer)], f"{prefix}L{layer}."
        # Slots of a full ring; before it is full the reference holds zeros.
        filled = [p % 8 for p in range(max(0, n - 8), n)]
        window = gold[name + "ring"][at]
        assert difference(own["window"][filled], window[filled]) <= LIMIT
        if not ratio:
            continue
        done = n // ratio
        entries = own["entries"]["entries"][:done]
        assert difference(entries, gold[name + "comp_cache"][at][:done]) <= LIMIT
        live = n % ratio
        for mine, theirs in (("values", "kv_state"), ("scores", "score_state")):
            rows = gold[name + theirs][at]
            offset = 4 if ratio == 4 else 0
            slots = [p % (8 if ratio == 4 else ratio) for p in range(n - live, n)]
            want = rows[offset : offset + live]
            assert difference(own["entries"][mine][slots], want) <= LIMIT


def test_index_entries_are_those_of_the_reference_but_for_its_rotation(prompt):
    gold = arrays("native_state")
    runner = Runner()
    feed_all(runner, prompt[:13])
    found = runner.host_state()["2"]["index"]["entries"][:3]
    from dspark_jax.models.deepseek_v4.rounding import hadamard

    stored = gold["after_prefill.L2.idx_cache"][:3]
    assert difference(hadamard(found), stored) <= LIMIT


def test_published_ratios():
    """Windows of 128 and entries of 128 positions; a block crosses position 256."""
    gold = arrays("flash_ratios")
    runner = Runner("b", 320)
    ids = gold["prompt"]
    first, _ = zip(*(runner.feed(ids[at : at + 42]) for at in range(0, 252, 42)),
                   strict=True)  # fmt: skip
    chunk, _ = runner.feed(ids[252:258])
    assert difference(chunk, gold["chunk_252_logits"]) <= LIMIT
    rest, _ = runner.feed(ids[258:300])
    logits = np.concatenate([*first, chunk, rest])
    assert difference(logits[-64:], gold["logits_last64"]) <= LIMIT
    decoded = gold["decode_logits"]
    assert difference(logits[250:290], decoded) <= LIMIT


def test_raw_rows_of_published_ratios():
    gold = arrays("flash_ratios")
    runner = Runner("b", 320)
    ids = gold["prompt"][:290]
    for at in range(0, 252, 42):
        runner.feed(ids[at : at + 42])
    runner.feed(ids[252:290], 42)
    own = runner.host_state()
    live = 290 % 128
    slots = [p % 128 for p in range(290 - live, 290)]
    for mine, theirs in (("values", "kv"), ("scores", "score")):
        want = gold[f"L2_{theirs}_state_after_290"]
        assert difference(own["2"]["entries"][mine][slots], want) <= LIMIT
        want = gold[f"L1_{theirs}_state_after_290"][4 : 4 + 290 % 4]
        slots4 = [p % 8 for p in range(288, 290)]
        assert difference(own["1"]["entries"][mine][slots4], want) <= LIMIT


def swap(params, first, second):
    """Parameters with two leaves exchanged."""
    flat = flatten(params)
    flat[first], flat[second] = flat[second], flat[first]
    return unflatten(flat)


@functools.cache
def wrong_models():
    """Name -> (config, parameters) of plausible mistakes."""
    config, params = target()

    def changed(**fields):
        return dataclasses.replace(config, **fields), params

    experts = ("layers", "4", "ffn", "experts")
    w1 = flatten(params)[(*experts, "w1", "weight")]
    exchanged = dict(flatten(params))
    exchanged[(*experts, "w1", "weight")] = w1[::-1]
    plain = config.rope
    return {
        "another expert": (config, unflatten(exchanged)),
        "gate for up": (
            config,
            swap(params, (*experts, "w1", "weight"), (*experts, "w3", "weight")),
        ),
        "a single Sinkhorn step": changed(sinkhorn_iterations=1),
        "no bound on experts": changed(swiglu_limit=10.0),
        "weights not scaled": changed(route_scale=1.0),
        "plain rotation of entries": changed(compress_rope=plain),
        "one entry fewer": changed(index_topk=2),
        "window of seven": changed(window=7),
    }


# Those that change the settings compile programs of their own.
QUICK = ("another expert", "gate for up")
SLOW = (
    "a single Sinkhorn step",
    "no bound on experts",
    "weights not scaled",
    "plain rotation of entries",
    "one entry fewer",
    "window of seven",
)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_plausible_mistakes_are_far_beyond_the_limit(name, prompt):
    config, params = wrong_models()[name]
    runner = Runner(config=config, params=params)
    logits, _ = feed_all(runner, prompt)
    error = difference(logits, arrays("hf_prefill")["a.logits"])
    assert error > 20 * LIMIT, f"{name}: {error}"
