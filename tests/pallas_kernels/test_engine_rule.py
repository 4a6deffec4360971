"""The reference engine's rule on seeded rows: law, ends, fallback, fresh rows."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import engine
from pallas_kernels.verify import textbook

verify_rows = jax.jit(engine.verify_rows, static_argnames="penalty")
weights_of = jax.jit(lambda log_p: engine.fixed_weights(jnp.exp(log_p)))
draw = jax.jit(engine.draw)
stream_words = jax.jit(engine.stream_words, static_argnums=3)


def log(probs):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, np.float64)).astype(np.float32)


def fractions(values):
    return np.asarray([float(Fraction(v)) for v in values])


def test_law_of_seeded_draws(golden, seed_words):
    """The whole chain, drafts included: 4 standard errors are half of 1/2 - 19/39."""
    data = golden("one_position_exact")
    count = 150_000
    target, draft = fractions(data["target"]), fractions(data["draft"])
    want = fractions(data["tables"]["9/10"]["output"])
    p, q = (np.tile(log([x]), (count, 1)) for x in (target, draft))
    seed = np.tile(seed_words([2**63 + 12345]), (count, 1))
    position = np.arange(count, dtype=np.int32)
    weights, verify = weights_of(q), np.ones(count, bool)

    def emitted(drafts):
        rows = verify_rows(
            p, q, p, drafts, verify, seed, position, penalty=-math.log(0.9)
        )
        return np.bincount(rows.token, minlength=3) / count, rows

    drafts = draw(weights, engine.draft_seed(seed), position, engine.FRESH)
    seen, rows = emitted(drafts.token)
    np.testing.assert_allclose(seen, want, atol=0.006)
    assert abs(np.mean(rows.accept) - 5 / 6) < 0.006
    assert np.abs(seen - target).max() > 0.006
    # Control: drafts that were chosen, not drawn from q.
    assert np.abs(emitted(np.ones(count, np.int32))[0] - want).max() > 0.1


# Rows of the small cases, all of one shape.
ROWS = 500
# A position at which the word of the accept stream is one of the 128 highest.
UNIFORM_IS_ONE = 16_964_503


def test_a_uniform_of_one_rejects_equal_rows():
    seed, verify = np.zeros((ROWS, 2), np.uint32), np.ones(ROWS, bool)
    position = UNIFORM_IS_ONE + np.arange(ROWS, dtype=np.int32)
    word = stream_words(seed, position, engine.ACCEPT, 1)[:, 0]
    is_one = np.asarray(engine.uniform(word)) == 1
    assert is_one[0] and is_one.sum() == 1
    # Control: a uniform of [0, 1) from the same word would let the draft stand.
    assert textbook.uniform(word)[0] < 1
    p = np.tile(log([[0.25, 0.7, 0.05]]), (ROWS, 1))
    rows = verify_rows(p, p, p, np.ones(ROWS, np.int32), verify, seed, position)
    np.testing.assert_array_equal(rows.accept, ~is_one)
    # The penalty leaves a residual to draw from: this is not the fallback.
    assert 1 - 2e-4 < rows.accept_prob[0] < 1 and rows.token[0] >= 0


def test_an_empty_residual_gives_the_first_maximum_of_the_logits():
    width = 129_280
    flat = np.full((1, width), -math.log(width), np.float32)
    logits = np.zeros((1, width), np.float32)
    logits[0, [777, 1234]] = 2
    steep = np.full((1, width), -np.inf, np.float32)
    steep[0, 5] = 0
    none, verify = np.full(1, -1, np.int32), np.ones(1, bool)
    seed, position = np.zeros((1, 2), np.uint32), np.zeros(1, np.int32)
    rows = verify_rows(flat, flat, logits, none, verify, seed, position)
    assert not rows.accept[0] and rows.token[0] == 777 and rows.accept_prob[0] == 1
    # Control: with a draft that is not flat, there is something to draw from.
    rows = verify_rows(flat, steep, logits, none, verify, seed, position)
    assert rows.token[0] != 777 and rows.accept_prob[0] < 0.01


def test_drafts_that_fall_and_stand_always(random_words):
    p = np.tile(log([[0, 0.5, 0.5]]), (ROWS, 1))
    q = np.tile(log([[0.5, 0.5, 0]]), (ROWS, 1))
    seed, verify = random_words(3, ROWS, 2), np.ones(ROWS, bool)
    position = np.arange(ROWS, dtype=np.int32)

    def judge(draft, q):
        drafts = np.full(ROWS, draft, np.int32)
        rows = verify_rows(p, q, p, drafts, verify, seed, position)
        assert (np.asarray(rows.token) > 0).all()  # 0 is outside the target's support
        return rows.accept

    for draft, expected in ((-1, False), (0, False), (1, True), (2, True)):
        np.testing.assert_array_equal(
            judge(draft, q), np.full(ROWS, expected), err_msg=str(draft)
        )
    # Excluded by both: the engine's device arithmetic lets it stand, this does not.
    assert not judge(0, np.full((ROWS, 3), -np.inf, np.float32)).any()
    nothing = np.full((1, 3), -np.inf, np.float32)
    chance = engine.acceptance(nothing, nothing, jnp.zeros(1, jnp.int32))
    np.testing.assert_array_equal(chance, 0)


def test_fresh_rows_draw_from_the_target(rng, random_words):
    # Where a row sums to 1, the last bit of an exponential decides whether its weights
    # reach 2^31, and with that which words may be used.
    p = log(rng.dirichlet(np.ones(3), size=ROWS) * 0.6)
    seed, position = random_words(4, ROWS, 2), np.arange(ROWS, dtype=np.int32)
    drafts, fresh = np.ones(ROWS, np.int32), np.zeros(ROWS, bool)
    rows = verify_rows(p, p * np.float32(np.nan), p, drafts, fresh, seed, position)
    assert rows.accept.all() and (rows.accept_prob == 1).all()
    weights = weights_of(p)
    want = draw(weights, seed, position, engine.FRESH).token
    np.testing.assert_array_equal(rows.token, want)
    # Rows without a draft, and with nothing in q, draw from it by the other stream.
    none, empty = np.full(ROWS, -1, np.int32), np.full_like(p, -np.inf)
    rows = verify_rows(p, empty, p, none, ~fresh, seed, position)
    other = draw(weights, seed, position, engine.REPLACEMENT).token
    np.testing.assert_array_equal(rows.token, other)
    assert not rows.accept.any() and (other != want).any()


def test_tokens_lie_in_the_order_that_is_asked_for():
    """A flat row of 8192 tokens is the narrowest with two orders."""
    p = np.full((8, 8192), -math.log(8192), np.float32)
    seed, position = np.zeros((8, 2), np.uint32), np.arange(8, dtype=np.int32)
    none, fresh = np.full(8, -1, np.int32), np.zeros(8, bool)
    weight = int(engine.fixed_weights(jnp.exp(p[0, :1]))[0])
    total = jnp.full(8, 8192 * weight, jnp.uint32)
    point, _ = engine.draw_point(total, seed, position, engine.FRESH)
    place = np.asarray(point) // weight
    judge = jax.jit(engine.verify_rows, static_argnames="order")
    rows = judge(p, p, p, none, fresh, seed, position, order="ids")
    np.testing.assert_array_equal(rows.token, place)
    # Control: four tokens in each of 2048 lanes are another order of most of them.
    assert (place % 4 * 2048 + place // 4 != place).sum() > 5


def test_penalty_is_checked():
    p, row = np.zeros((1, 2), np.float32), np.zeros(1, np.int32)
    seed, verify = np.zeros((1, 2), np.uint32), np.ones(1, bool)
    for penalty in (-1e-5, math.inf, math.nan):
        with pytest.raises(ValueError, match="`penalty` is"):
            engine.verify_rows(p, p, p, row, verify, seed, row, penalty=penalty)
