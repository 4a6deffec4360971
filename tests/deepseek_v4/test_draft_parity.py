"""The three-stage draft against the published engine, call by call."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models.draft import stages
from dspark_jax.models.draft.proposal import propose
from dspark_jax.models.params import flatten, unflatten
from dspark_jax.models.rows import dense_rows
from pallas_kernels import argmax_ids
from tests.deepseek_v4.goldens import FLOAT, LIMIT, arrays, difference, draft, target
from tests.models.quick import quick_jit

# Group of the recording, and a call in it whose rings were primed before.
CALLS = ("short.d1", "wrap.d0", "wrap.d1", "long.d1")
ROWS = 8


@functools.partial(quick_jit, static_argnums=0)
def _inject(config, params, context, features, count, start):
    tokens = jnp.zeros((1, features.shape[0]), jnp.int32)
    rows = dense_rows(tokens, count, start)
    return stages.inject(config, params, context, features, rows, count)


def primed(config, params, features, start=0, context=None):
    """Rings after these positions, in pieces of eight."""
    if context is None:
        context = stages.empty_context(config, 1, 0, FLOAT)
    for at in range(0, len(features), ROWS):
        part = features[at : at + ROWS]
        count = jnp.asarray([len(part)], jnp.int32)
        padded = np.pad(part, [(0, ROWS - len(part)), (0, 0)], constant_values=9.0)
        begin = jnp.asarray([start + at], jnp.int32)
        context = _inject(config, params, context, padded, count, begin)
    return context


@functools.partial(quick_jit, static_argnums=0)
def _draft(config, params, target_params, context, anchor, position):
    words = jnp.zeros((1, config.gamma), jnp.uint32)
    hidden = stages.block_rows(
        config, params, target_params, context, 0, anchor, position
    )
    base = stages.base_logits(config, params, target_params, hidden[0][0])
    proposal, logits = propose(
        config, params, target_params, context, 0, anchor, position, words,
        lambda x, _: (argmax_ids(x), None, None),
    )  # fmt: skip
    return hidden[1][0], base, logits[0], proposal


def call(config, params, context, committed, position):
    """One draft of one request: (plain hidden, base, logits, proposal)."""
    one = functools.partial(np.full, (1,), dtype=np.int32)
    target_params = target()[1]
    return _draft(config, params, target_params, context, one(committed), one(position))


def rings_of(config, recorded):
    return {
        str(i): {"ring": jnp.asarray(recorded[i : i + 1])}
        for i in range(config.backbone.num_layers)
    }


def stacked(context):
    return np.stack([np.asarray(one["ring"])[0] for one in context.values()])


@pytest.mark.parametrize("name", CALLS)
def test_a_call(name):
    """From recorded rings: hidden rows, logits, confidences and tokens."""
    gold = {k.removeprefix(name + "."): v for k, v in arrays("dspark_draft").items()}
    config, params = draft()
    position = int(gold["start_pos"]) + 1
    context = rings_of(config, gold["ring_after"])
    plain, base, logits, proposal = call(
        config, params, context, gold["committed"], position
    )
    assert difference(plain, gold["head_hidden"]) <= LIMIT
    assert difference(base, gold["base_logits"]) <= LIMIT
    assert difference(logits, gold["logits"]) <= LIMIT
    assert difference(proposal.confidence[0], gold["confidence"]) <= LIMIT
    assert (np.asarray(proposal.ids[0]) == gold["output_ids"][1:]).all()
    assert gold["output_ids"][0] == gold["committed"]


@pytest.mark.parametrize("name", ["short", "wrap"])
def test_rings_behind_a_prompt_and_a_committed_token(name):
    gold = arrays("dspark_draft")
    config, params = draft()
    main = gold[f"{name}.prime_main_hidden"]
    context = primed(config, params, main)
    # Slots of positions that do not exist hold anything.
    slots = [p % 8 for p in range(max(0, len(main) - 8), len(main))]
    want = gold[f"{name}.prime_ring"][:, slots]
    assert difference(stacked(context)[:, slots], want) <= LIMIT
    seed, at = gold[f"{name}.d1.seed_hidden"], int(gold[f"{name}.d1.start_pos"])
    assert at == len(main)
    context = primed(config, params, seed[None], at, context)
    slots = [p % 8 for p in range(max(0, at - 7), at + 1)]
    want = gold[f"{name}.d1.ring_after"][:, slots]
    assert difference(stacked(context)[:, slots], want) <= LIMIT


def test_last_positions_of_a_long_prompt_are_enough():
    gold = arrays("dspark_draft")
    config, params = draft()
    context = primed(config, params, gold["long.prime_main_hidden"], 61 - 8)
    assert difference(stacked(context), gold["long.prime_ring"]) <= LIMIT


@functools.cache
def wrong_calls():
    """Name -> what a plausible mistake makes of a call."""
    gold = arrays("dspark_draft")
    config, params = draft()
    context = rings_of(config, gold["wrap.d1.ring_after"])
    committed = gold["wrap.d1.committed"]
    position = int(gold["wrap.d1.start_pos"]) + 1
    flat = flatten(params)

    def without(path):
        return unflatten({**flat, path: jnp.zeros_like(flat[path])})

    seed_only = stages.empty_context(config, 1, 0, FLOAT)
    seed = gold["wrap.d1.seed_hidden"][None]
    seed_only = primed(config, params, seed, position - 1, seed_only)
    return {
        "no Markov bias": (
            without(("markov", "w2", "weight")), context, committed, position
        ),
        "a mixture that does not look at the streams": (
            without(("hc_head", "fn")), context, committed, position
        ),
        "only the seed primed": (params, seed_only, committed, position),
        "position off by one": (params, context, committed, position + 1),
        "another token": (params, context, (committed + 1) % 128, position),
    }  # fmt: skip


WRONG = (
    "no Markov bias",
    "a mixture that does not look at the streams",
    "only the seed primed",
    "position off by one",
    "another token",
)


@pytest.mark.parametrize("name", WRONG)
def test_plausible_mistakes_are_far_beyond_the_limit(name):
    params, context, committed, position = wrong_calls()[name]
    found = call(draft()[0], params, context, committed, position)
    error = difference(found[2], arrays("dspark_draft")["wrap.d1.logits"])
    assert error > 100 * LIMIT, f"{name}: {error}"


def test_a_sum_over_streams_instead_of_their_mean_is_hidden_by_the_norm():
    gold = arrays("dspark_draft")
    config, params = draft()
    main = 4 * gold["wrap.prime_main_hidden"]
    # The norm behind the projection takes the factor out, but for its epsilon.
    context = primed(config, params, main)
    error = difference(stacked(context), gold["wrap.prime_ring"])
    assert error < 1e-3


def test_every_input_matters():
    """Anchor, position, and each position of the rings."""
    gold = arrays("dspark_draft")
    config, params = draft()
    recorded = gold["wrap.d1.ring_after"]
    committed = gold["wrap.d1.committed"]
    position = int(gold["wrap.d1.start_pos"]) + 1
    base = call(config, params, rings_of(config, recorded), committed, position)[2]
    for slot in range(8):
        for stage in range(3):
            moved = recorded.copy()
            moved[stage, slot] += 0.5
            found = call(config, params, rings_of(config, moved), committed, position)
            assert difference(found[2], base) > 1e-4, (stage, slot)
