"""A rejected row leaves nothing behind; in the published form of the state it does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models import deepseek_v4
from tests.deepseek_v4.goldens import FLOAT, LIMIT, Runner, _step, arrays, target
from tests.deepseek_v4.ring_double import RingDouble

BLOCK, STEPS, CAPACITY = 6, 32, 96
# Blocks before, across and behind the edges of 4, 8 (the window) and 16 positions.
STARTS = range(2, 19)
# Two requests for every accepted length, which differ behind it, and one that was
# never offered a wrong token.
ACCEPTED = (0, 1, 2, 3, 4, 5)


def feed(state, tokens, lengths, start):
    config, params = target()
    return _step(
        config, params, state, CAPACITY, (), jnp.asarray(tokens, jnp.int32),
        jnp.asarray(lengths, jnp.int32), jnp.asarray(start, jnp.int32),
    )  # fmt: skip


@pytest.fixture(scope="module")
def prompt():
    return arrays("hf_prefill")["prompt_b"]


def spread(state, count):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape[1:])), state)


@pytest.mark.parametrize("start", STARTS)
def test_rejected_rows_change_no_bit(prompt, start):
    count = 2 * len(ACCEPTED)
    state = deepseek_v4.empty_state(target()[0], count, CAPACITY, FLOAT)
    # The prompt, by the same program.
    for at in range(0, start, BLOCK):
        part = prompt[at : min(at + BLOCK, start)]
        block = np.zeros((count, BLOCK), np.int32)
        block[:, : len(part)] = part
        where = np.full((count,), at)
        *_, state = feed(state, block, np.full((count,), len(part)), where)
    rng = np.random.default_rng(start)
    block = np.broadcast_to(prompt[start : start + BLOCK], (count, BLOCK)).copy()
    kept = np.repeat(ACCEPTED, 2) + 1
    for row in range(count):
        # Not what comes next in the prompt, and not the same in both of a pair.
        wrong = (block[row] + 1 + rng.integers(0, 60) + 60 * (row % 2)) % 128
        block[row, kept[row] :] = wrong[kept[row] :]
    begin = np.full((count,), start)
    *_, state = feed(state, block, kept, begin)
    for leaf in jax.tree.leaves(jax.tree.map(np.asarray, state)):
        np.testing.assert_array_equal(leaf[0::2], leaf[1::2])
    # Every request goes on with the prompt from where it stands.
    length, logits = begin + kept, []
    for _ in range(0, STEPS, BLOCK):
        block = np.stack([prompt[n : n + BLOCK] for n in length])
        found, _, state = feed(state, block, np.full((count,), BLOCK), length)
        length = length + BLOCK
        logits.append(np.asarray(found))
    logits = np.concatenate(logits, axis=1)
    np.testing.assert_array_equal(logits[0::2], logits[1::2])
    clean = clean_logits(tuple(prompt))
    for row in range(count):
        at = int(begin[row] + kept[row])
        wanted = clean[at : at + logits.shape[1]]
        assert np.abs(logits[row] - wanted).max() <= LIMIT


_CLEAN = {}


def clean_logits(prompt):
    """Logits of the prompt, six tokens at a time from its first one."""
    if prompt not in _CLEAN:
        runner = Runner()
        parts = [
            runner.feed(prompt[at : at + BLOCK], BLOCK)[0]
            for at in range(0, len(prompt), BLOCK)
        ]
        _CLEAN[prompt] = np.concatenate(parts)
    return _CLEAN[prompt]


# What is put back after a wrong block, and whether that is enough.
PARTS = {
    "nothing": (False, False),
    "accumulators": (True, False),
    "accumulators and rings": (True, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("start", [1, 4, 9, 13])
def test_the_published_form_breaks(prompt, start):
    """One row accepted, five wrong ones written."""
    clean = clean_logits(tuple(prompt))
    errors = {}
    for name, (accumulators, rings) in PARTS.items():
        double = RingDouble()
        double.feed(prompt[: start + 1])
        before = double.snapshot()
        double.feed((prompt[start + 1 : start + 6] + 64) % 128)
        double.back_to(start + 1)
        if accumulators:
            double.restore(before, window=rings)
        found = double.feed(prompt[start + 1 : start + 17])
        errors[name] = np.abs(found - clean[start + 1 : start + 17]).max()
    assert errors["accumulators and rings"] <= LIMIT
    # Whatever crosses a boundary of four, the shifted rows are gone.
    assert errors["nothing"] > 1e-2
    # Rings alone are safe for as long as they are not full.
    full = start + 6 > 8
    assert (errors["accumulators"] > 1e-2) == full, errors


@pytest.mark.slow
def test_the_double_is_right_when_nothing_is_rejected(prompt):
    found = RingDouble().feed(prompt[:40])
    assert np.abs(found - clean_logits(tuple(prompt))[:40]).max() <= LIMIT
