"""The reference engine's generator and its streams, word for word."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import engine
from pallas_kernels.engine import philox
from pallas_kernels.verify import textbook

stream_words = jax.jit(engine.stream_words, static_argnums=3)
NAMES = {"fresh": engine.FRESH, "replacement": engine.REPLACEMENT}
NAMES["accept"] = engine.ACCEPT
LAST = 2**32 - 1


def ints(values):
    return jnp.asarray(values, jnp.int32)


def as_number(words):
    return [int(low) + (int(high) << 32) for low, high in np.asarray(words)]


def known_answers(golden):
    cases = golden("rng_streams")["known_answers"]
    return [
        np.asarray([case[name] for case in cases], np.uint32)
        for name in ("key", "counter", "out")
    ]


def test_known_answers(golden):
    key, counter, out = known_answers(golden)
    words = jax.jit(engine.philox4x32)(key, counter)
    assert words.dtype == jnp.uint32
    np.testing.assert_array_equal(words, out)


@pytest.mark.parametrize(
    "name, value",
    [
        ("ROUNDS", 9),
        ("MULTIPLIERS", (0xCD9E8D57, 0xD2511F53)),
        ("MULTIPLIERS", (0xD2511F53, 0xCD9E8D5B)),
        ("KEY_STEPS", (0x9E3779B9, 0xBB67AE84)),
    ],
)
def test_known_answers_refuse_wrong_constants(name, value, golden, monkeypatch):
    key, counter, out = known_answers(golden)
    monkeypatch.setattr(philox, name, value)
    words = np.asarray(engine.philox4x32(jnp.asarray(key), jnp.asarray(counter)))
    assert (words != out).any(1).all()


def test_streams_of_verified_rows(golden, seed_words):
    cases = golden("rng_streams")["verify_rows"]
    seed = seed_words(case["seed"] for case in cases)
    base = ints([case["base_position"] for case in cases])
    step = ints([case["local_step"] for case in cases])
    position = engine.decode_position(base, step)
    np.testing.assert_array_equal(
        position, [case["effective_position"] for case in cases]
    )
    for name, stream in NAMES.items():
        want = [case[name] for case in cases]
        number = engine.sequence_number(position, stream)
        assert as_number(number) == [w["sequence"] for w in want], name
        words = np.asarray([w["u32"] for w in want], np.uint32)
        np.testing.assert_array_equal(stream_words(seed, position, stream, 5), words)
        # Control: the neighbouring stream, another step's stride, the other word first.
        wrong = [
            stream_words(seed, position, stream + 1, 5),
            stream_words(seed, position + step, stream, 5),
            stream_words(seed[:, ::-1], position, stream, 5),
        ]
        assert (np.asarray(wrong[0]) != words).any(1).all()
        moved = np.asarray(step) > 0
        assert (np.asarray(wrong[1]) != words).any(1)[moved].all()
        swapped = np.asarray(seed[:, 0] != seed[:, 1])
        assert (np.asarray(wrong[2]) != words).any(1)[swapped].all()

    uniform = engine.uniform(stream_words(seed, position, engine.ACCEPT, 1)[:, 0])
    want = [case["accept"] for case in cases]
    bits = np.asarray([int(w["uniform_hex"], 16) for w in want], np.uint32)
    np.testing.assert_array_equal(np.asarray(uniform).view(np.uint32), bits)
    np.testing.assert_array_equal(uniform, [w["uniform_float32"] for w in want])


def test_streams_of_drafts(golden, seed_words):
    data = golden("rng_streams")
    assert engine.streams.DRAFT_SEED_OFFSET == data["constants"]["draft_seed_offset"]
    assert engine.streams.STEP_STRIDE == data["constants"]["local_step_multiplier"]
    cases = data["draft_rows"]
    position = engine.draft_position(
        ints([case["base_position"] for case in cases]),
        ints([case["accepted"] for case in cases]),
        ints([case["draft_step"] for case in cases]),
    )
    np.testing.assert_array_equal(position, [case["draft_position"] for case in cases])
    number = engine.sequence_number(position, engine.FRESH)
    assert as_number(number) == [case["sequence"] for case in cases]
    seed = seed_words(case["seed"] for case in cases)
    want = np.asarray([case["u32"] for case in cases], np.uint32)
    words = stream_words(engine.draft_seed(seed), position, engine.FRESH, 2)
    np.testing.assert_array_equal(words, want)
    # Control: without the offset, and with one that loses the carry.
    plain = stream_words(seed, position, engine.FRESH, 2)
    assert (np.asarray(plain) != want).any(1).all()
    no_carry = seed.at[:, 0].add(jnp.uint32(engine.streams.DRAFT_SEED_OFFSET))
    lost = stream_words(no_carry, position, engine.FRESH, 2)
    assert (np.asarray(lost) != want).any()


def test_64_bit_numbers(rng, seed_words):
    seeds = [0, LAST, 2**64 - 1, 2**64 - 10**9 - 7, 2**64 - 10**9 - 8]
    seeds += [2**32 - 10**9 - 7, 2**32 - 10**9 - 8, *map(int, rng.bytes(40))]
    offset = [(seed + 1_000_000_007) % 2**64 for seed in seeds]
    assert as_number(engine.draft_seed(seed_words(seeds))) == offset

    # 3 * 1431655765 is the last number of one word.
    positions = [0, 1, 1431655764, 1431655765, 1431655766, 2**31 - 1]
    for stream in range(3):
        number = engine.sequence_number(ints(positions), stream)
        assert as_number(number) == [3 * p + stream for p in positions]


def test_uniform_is_above_zero_and_reaches_one(golden):
    data = golden("rng_streams")["uniform_float32"]
    count = data["inputs_that_give_exactly_one"]
    top = jnp.asarray(np.arange(LAST - 4 * count, LAST + 1), jnp.uint32)
    uniform = np.asarray(engine.uniform(top))
    assert uniform.dtype == np.float32
    assert (uniform == 1).sum() == count and (uniform[-count:] == 1).all()
    zero = engine.uniform(jnp.zeros(1, jnp.uint32))
    np.testing.assert_array_equal(zero, np.float32(data["smallest"]))
    # Control: the usual uniform of [0, 1) has neither end.
    usual = np.asarray(textbook.uniform(top))
    assert usual.max() < 1 and textbook.uniform(jnp.uint32(0)) == 0


def test_leading_axes(random_words):
    seed = random_words(0, 2, 3, 2)
    position = ints(np.arange(6).reshape(2, 3))
    stream = ints([[0, 1, 2], [2, 1, 0]])
    whole = np.asarray(stream_words(seed, position, stream, 7))
    assert whole.shape == (2, 3, 7)
    for i, j in np.ndindex(2, 3):
        one = stream_words(seed[i, j], position[i, j], int(stream[i, j]), 7)
        np.testing.assert_array_equal(whole[i, j], one)


def test_a_verified_row_is_not_indexed_by_its_place_in_the_text():
    begun_there = engine.decode_position(ints(20), ints(0))
    begun_before = engine.decode_position(ints(18), ints(2))
    assert begun_there == 20 and begun_before == 18 + 2 * 10_000_019
    seed = jnp.zeros(2, jnp.uint32)
    words = [stream_words(seed, p, 0, 4) for p in (begun_there, begun_before)]
    assert (words[0] != words[1]).any()


def test_two_proposals_for_one_place_share_their_words():
    # Token 20, after a step from 17 that accepted nothing and one that accepted two.
    assert engine.draft_position(ints(17), ints(0), ints(2)) == 20
    assert engine.draft_position(ints(17), ints(2), ints(0)) == 20
    assert engine.draft_position(ints(18), ints(0), ints(1)) == 20


def test_seeds_that_share_their_words(seed_words):
    seed = seed_words([5, 5 + 1_000_000_007])
    drafts = stream_words(engine.draft_seed(seed), ints([9, 9]), engine.FRESH, 4)
    fresh = stream_words(seed, ints([9, 9]), engine.FRESH, 4)
    np.testing.assert_array_equal(drafts[0], fresh[1])
    assert (drafts[0] != fresh[0]).all() and (drafts[1] != fresh[1]).all()
