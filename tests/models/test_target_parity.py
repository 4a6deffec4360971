"""Targets against the reference: logits and every layer's output."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import RopeConfig
from dspark_jax.models import dense
from dspark_jax.models.kv_cache import empty_cache
from dspark_jax.models.params import for_cpu
from dspark_jax.models.rows import dense_rows
from tests.models.goldens import (
    TARGETS,
    arrays,
    error,
    read_target,
    right_padded,
    tolerance,
)
from tests.models.quick import quick_jit

# Positions of the cache, and tokens fed at once when a prompt goes in pieces.
CAPACITY, CHUNK = 40, 8


def setup(name, stacked):
    config, params = read_target(name)
    params = params if stacked else for_cpu(params)
    cache = empty_cache(config, 2, CAPACITY, jnp.dtype("float32"), stacked)
    return config, params, cache


@functools.partial(quick_jit, static_argnums=0)
def evaluate_whole(config, params, cache, tokens, lengths):
    rows = dense_rows(tokens, lengths, jnp.zeros_like(lengths))
    taps = tuple(range(-1, config.num_layers))
    logits, features, _ = dense.evaluate(config, params, cache, CAPACITY, rows, taps)
    shape = (*tokens.shape, -1)
    return logits.reshape(shape), features.reshape(*shape[:2], len(taps), -1)


@functools.partial(quick_jit, static_argnums=0)
def evaluate_chunk(config, params, cache, tokens, lengths, start):
    rows = dense_rows(tokens, lengths, start)
    logits, _, pending = dense.evaluate(config, params, cache, CAPACITY, rows)
    cache = dense.commit(config, cache, pending, start, lengths)
    return cache, logits.reshape(*tokens.shape, -1)


def prompts(name):
    data = arrays(f"{name}/target_fwd")
    return data, [data[f"p{i}_ids"] for i in (0, 1)]


@pytest.mark.parametrize("stacked", [False, True], ids=["listed", "stacked"])
@pytest.mark.parametrize("name", TARGETS)
def test_logits_and_hidden_states(name, stacked):
    config, params, cache = setup(name, stacked)
    data, ids = prompts(name)
    logits, features = evaluate_whole(config, params, cache, *right_padded(ids))
    for i, prompt in enumerate(ids):
        length = len(prompt)
        assert error(logits[i, :length], data[f"p{i}_logits"]) <= tolerance(name)
        hidden = np.asarray(features[i, :length]).transpose(1, 0, 2)
        # The reference stores its last entry after the final norm.
        reference = data[f"p{i}_hidden_states"].copy()
        reference[-1] = data[f"p{i}_last_layer_raw"]
        for layer, rows in enumerate(reference):
            assert error(hidden[layer], rows) <= tolerance(name), f"layer {layer - 1}"


@pytest.mark.parametrize("name", TARGETS)
def test_chunks_then_single_rows_equal_one_pass(name):
    config, params, cache = setup(name, stacked=False)
    data, ids = prompts(name)
    # The longer prompt: two chunks of different length, then row by row. The
    # shorter one is done earlier and idles, with rows of length 0.
    sizes = [CHUNK, CHUNK - 3] + [1] * (len(ids[1]) - 2 * CHUNK + 3)
    done = np.zeros(2, np.int32)
    seen = [[], []]
    for size in sizes:
        tokens, counts = np.full((2, CHUNK), 7, np.int32), np.zeros(2, np.int32)
        for row, prompt in enumerate(ids):
            part = prompt[done[row] : done[row] + size]
            tokens[row, : len(part)], counts[row] = part, len(part)
        cache, logits = evaluate_chunk(config, params, cache, tokens, counts, done)
        for row, count in enumerate(counts):
            seen[row].append(np.asarray(logits)[row, :count])
        done = done + counts
    for i in (0, 1):
        ours, reference = np.concatenate(seen[i]), data[f"p{i}_logits"]
        assert error(ours, reference) <= tolerance(name)
        assert (ours.argmax(-1) == reference.argmax(-1)).all()


def test_a_wrong_rope_base_or_tap_is_noticed():
    config, params, cache = setup("llama_rand", stacked=False)
    data, ids = prompts("llama_rand")
    wrong = dataclasses.replace(config.full, rope=RopeConfig(theta=3e5))
    wrong = dataclasses.replace(config, full=wrong)
    logits, features = evaluate_whole(wrong, params, cache, *right_padded(ids))
    assert error(logits[1], data["p1_logits"]) > 100 * tolerance("llama_rand")
    hidden = data["p1_hidden_states"]
    assert error(features[1, :, 0], hidden[0]) <= tolerance("llama_rand")
    assert error(features[1, :, 0], hidden[1]) > 100 * tolerance("llama_rand")
