"""Integer Gumbel noise: its words, its values, and the law of the winner."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from pallas_kernels import noise
from pallas_kernels.fixed_point import scale_of
from pallas_kernels.verify.api import verify_shared_noise

noisy_argmax = jax.jit(noise.noisy_argmax)


def test_words_are_those_of_threefry(rng):
    key = jnp.asarray(rng.integers(0, 2**32, 2, np.uint64), jnp.uint32)
    count = jnp.arange(1000, dtype=jnp.uint32)
    block = threefry_2x32(key, jnp.concatenate([jnp.zeros_like(count), count]))
    words = noise.threefry(key[None], count)
    np.testing.assert_array_equal(words, block[:1000] ^ block[1000:])


def test_logarithms_are_close():
    value = np.unique(np.geomspace(1, 2**32 - 1, 200_000).astype(np.uint32))
    got = np.asarray(jax.jit(noise.log2)(value)) / 2**24
    np.testing.assert_allclose(got, np.log2(value.astype(np.float64)), atol=2e-7)
    assert (np.diff(got) >= 0).all()


def test_noise_is_close_everywhere():
    """Both ends count: rare tokens win by the largest noise only."""
    low = np.unique(np.geomspace(1, 2**31, 100_000).astype(np.uint32))
    word = np.unique(np.concatenate([low, np.uint32(2**32 - 1) - low])) | np.uint32(1)
    got = np.asarray(jax.jit(noise.gumbel)(word)) / 2**20
    rest = word.astype(np.float64) / 2**32
    exact = -np.log2(-np.log1p(-rest) / np.log(2))
    np.testing.assert_allclose(got, exact, atol=2e-6)
    assert got.min() > -5.1 and got.max() < 31.6


def test_an_even_word_has_the_noise_of_the_odd_one_above():
    """So that no word makes noise without end: u is never 0 or 1."""
    even = np.asarray([0, 2, 1000, 2**31 - 2, 2**31, 2**32 - 2], np.uint32)
    got = np.asarray(jax.jit(noise.gumbel)(even))
    np.testing.assert_array_equal(got, noise.gumbel(jnp.asarray(even | np.uint32(1))))
    assert got.max() == got[0] and got.min() == got[-1]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_winner_is_that_of_floats(rng, dtype):
    """Key, id and logit of every token, each in its place."""
    logits = jnp.asarray(rng.normal(size=(100, 40)) * 4, dtype)
    keys = jnp.asarray(rng.integers(0, 2**32, (100, 2), np.uint64), jnp.uint32)
    got = noisy_argmax(logits, jnp.asarray(scale_of(np.full(100, 0.8))), keys)
    column = jnp.arange(40, dtype=jnp.uint32)
    counter = jnp.concatenate([jnp.zeros_like(column), column])
    words = np.asarray([threefry_2x32(key, counter) for key in keys])
    share = ((words[:, :40] ^ words[:, 40:]) | np.uint32(1)) / 2**32
    wide = np.asarray(logits, np.float32).astype(np.float64)
    score = wide / 0.8 - np.log(-np.log1p(-share))
    second, best = np.sort(score, axis=1)[:, -2:].T
    clear = best - second > 1e-4
    assert clear.sum() > 90
    np.testing.assert_array_equal(np.asarray(got)[clear], score.argmax(1)[clear])


def test_equal_scores_go_to_the_lowest_column():
    """Columns of one id have one noise."""
    logits = jnp.tile(jnp.asarray([0.0, 1.0, 1.0]), (64, 1))
    ids = jnp.tile(jnp.asarray([4, 7, 7], jnp.int32), (64, 1))
    keys = jnp.arange(128, dtype=jnp.uint32).reshape(64, 2)
    got = noisy_argmax(logits, jnp.asarray(scale_of(np.ones(64))), keys, ids)
    assert set(np.unique(got)) == {0, 1}


def shares(law, samples, seed=0):
    """How often each token wins, and each pair of two laws with one key."""
    law = np.atleast_2d(np.asarray(law, float))
    with np.errstate(divide="ignore"):
        logits = np.log(law)
    keys = np.random.default_rng(seed).integers(0, 2**32, (samples, 2), np.uint64)
    keys = jnp.asarray(keys, jnp.uint32)
    scale = jnp.asarray(scale_of(np.ones(samples)))
    return [
        np.asarray(
            noisy_argmax(
                jnp.asarray(np.tile(row, (samples, 1)), jnp.float32), scale, keys
            )
        )
        for row in logits
    ]


def test_the_law_is_the_softmax():
    law = np.asarray([0.55, 0.25, 0.0, 0.15, 0.04, 0.01])
    (tokens,) = shares(law, 200_000)
    seen = np.bincount(tokens, minlength=6)
    assert seen[2] == 0
    live = law > 0
    expected = law[live] * len(tokens)
    chi = ((seen[live] - expected) ** 2 / expected).sum()
    assert chi < 23.5  # 99.97 % of four degrees of freedom.


def test_matching_is_the_closed_form(golden):
    for case in golden("shared_noise_matching")["cases"]:
        p, q = ([float(Fraction(x)) for x in case[k]] for k in ("target", "draft"))
        one, other = shares([p, q], 60_000, seed=len(p))
        expected = float(Fraction(case["match_probability_shared_gumbel"]))
        spread = np.sqrt(expected * (1 - expected) / 60_000)
        assert abs((one == other).mean() - expected) <= 4.5 * spread


def test_control_noise_of_its_own_matches_less():
    p, q = [1 / 2, 1 / 3, 1 / 6], [1 / 3, 1 / 2, 1 / 6]
    (one,), (other,) = shares(p, 20_000, seed=1), shares(q, 20_000, seed=2)
    # Independent draws agree with probability sum p q = 13/36, not 17/21.
    assert abs((one == other).mean() - 13 / 36) < 0.02


def test_greedy_and_unusable_rows():
    logits = np.asarray(
        [[1.0, 3.0, 3.0], [np.nan, 1, 2], [-np.inf] * 3, [-np.inf, 0, -np.inf]],
        np.float32,
    )
    scale = jnp.asarray(scale_of(np.asarray([0.0, 1.0, 1.0, 1.0])))
    for seed in range(20):
        keys = jnp.asarray(np.full((4, 2), seed, np.uint32))
        got = noisy_argmax(jnp.asarray(logits), scale, keys)
        np.testing.assert_array_equal(got, [1, -1, -1, 1])


def judged(logits, scale, keys, axis_name):
    """The winner, by itself and as a verdict on drafts."""
    ids, fresh = jnp.zeros(len(scale), jnp.int32), jnp.zeros(len(scale), bool)
    rows = verify_shared_noise(logits, scale, ids, fresh, keys, axis_name=axis_name)
    return noise.noisy_argmax(logits, scale, keys, axis_name=axis_name), rows.token


@pytest.mark.parametrize("width", [64, 600])
def test_split_vocabulary_changes_no_bit(rng, vocab_mesh, width):
    split = jax.jit(
        jax.shard_map(
            functools.partial(judged, axis_name="vocab"),
            mesh=vocab_mesh,
            in_specs=(jax.P(None, "vocab"), jax.P(), jax.P()),
            out_specs=jax.P(),
        )
    )
    logits = jnp.asarray(rng.normal(size=(32, width)) * 2, jnp.float32)
    scale = jnp.asarray(scale_of(rng.choice([0.0, 0.7, 1.0], 32)))
    keys = jnp.asarray(rng.integers(0, 2**32, (32, 2), np.uint64), jnp.uint32)
    expected = noisy_argmax(logits, scale, keys)
    for got in split(logits, scale, keys):
        np.testing.assert_array_equal(got, expected)
    # A reduced vocabulary asks for the noise of its tokens' ids.
    part = np.sort(rng.choice(width, width // 2, replace=False)).astype(np.int32)
    ids = jnp.broadcast_to(jnp.asarray(part), (32, len(part)))
    got = np.asarray(noisy_argmax(logits[:, part], scale, keys, ids))
    hidden = np.full((32, width), -np.inf, np.float32)
    hidden[:, part] = np.asarray(logits)[:, part]
    whole = noisy_argmax(jnp.asarray(hidden), scale, keys)
    np.testing.assert_array_equal(part[got], whole)
