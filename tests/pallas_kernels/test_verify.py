"""The rule in floats: exact laws by enumeration, reference rows, field reports."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.verify import textbook

verify_rows = jax.jit(textbook.verify_rows)
verify_greedy = jax.jit(pk.verify_greedy)

SIXTHS = [s for s in itertools.product(range(7), repeat=3) if sum(s) == 6]
PARTS = 60  # every threshold p/q and every residual share in sixths is a grid point


def emitted_law(verify, p, q, words, draft_law=None):
    """Law of the token of one position, for pairs of rows.

    Goes through `verify` for every draft and every pair of grid words.

    Args:
      verify: verify_rows, or a wrong version of it.
      p, q: float[N, 3], as given to `verify`.
      words: uint32[n], midpoints of n equal parts.
      draft_law: float[N, 3], what the drafts follow; None is q.

    Returns:
      float64[N, 3] law, float64[N] share of accepted drafts.
    """
    count, width = p.shape
    draft_law = q if draft_law is None else draft_law
    n = len(words)
    shape = (count, width, n, n)
    rows = np.indices(shape).reshape(4, -1)
    result = verify(
        jnp.asarray(p, jnp.float32)[rows[0]],
        jnp.asarray(q, jnp.float32)[rows[0]],
        jnp.asarray(rows[1], jnp.int32),
        jnp.ones(rows.shape[1], bool),
        jnp.asarray(words)[rows[2]],
        jnp.asarray(words)[rows[3]],
    )
    token = np.asarray(result.token).reshape(shape)
    share = np.stack([(token == t).mean((2, 3)) for t in range(width)], -1)
    accept = np.asarray(result.accept).reshape(shape).mean((2, 3))
    return (draft_law[..., None] * share).sum(1), (draft_law * accept).sum(1)


def fractions(values):
    return np.asarray([float(Fraction(v)) for v in values])


def test_one_position_exact(golden, grid_words):
    data = golden("one_position_exact")
    table = data["tables"]["1"]
    p = fractions(data["target"])[None]
    q = fractions(data["draft"])[None]
    law, accepted = emitted_law(verify_rows, p, q, grid_words(PARTS))
    np.testing.assert_allclose(law[0], fractions(table["output"]), atol=1e-12)
    mean = float(Fraction(table["mean_acceptance_standard"]))
    np.testing.assert_allclose(accepted, mean, atol=1e-12)

    rows = verify_rows(
        jnp.asarray(np.repeat(p, 3, 0), jnp.float32),
        jnp.asarray(np.repeat(q, 3, 0), jnp.float32),
        jnp.arange(3),
        jnp.ones(3, bool),
        jnp.full(3, 2**32 - 1, jnp.uint32),
        jnp.full(3, 2**31, jnp.uint32),
    )
    np.testing.assert_allclose(rows.accept_prob, mean, atol=1e-6)
    # Only token 1 can fall (2/3), and all of the replacement mass is on token 0.
    np.testing.assert_array_equal(rows.accept, [True, False, True])
    np.testing.assert_array_equal(rows.token, [0, 0, 2])


def grid_chunks():
    q = np.asarray(SIXTHS) / 6
    for target in SIXTHS:
        yield target, np.repeat(np.asarray([target]) / 6, len(SIXTHS), 0), q


def test_one_position_grid(golden, grid_words):
    """All 784 pairs of rows in sixths: the emitted token follows p."""
    golden_rows = {
        (tuple(row[0]), tuple(row[1])): float(Fraction(row[2]))
        for row in golden("one_position_grid")["rows"]
    }
    words = grid_words(PARTS)
    checked = 0
    for target, p, q in grid_chunks():
        law, accepted = emitted_law(verify_rows, p, q, words)
        np.testing.assert_allclose(law, p, atol=1e-6)
        expected = [golden_rows[target, draft] for draft in SIXTHS]
        np.testing.assert_allclose(accepted, expected, atol=1e-6)
        checked += len(expected)
    assert checked == len(golden_rows) == 784


def replacement_from_p(p, q, x, is_verify, accept_words, token_words):
    rows = textbook.verify_rows(p, q, x, is_verify, accept_words, token_words)
    drawn = textbook.draw(p, textbook.uniform(token_words))
    return rows._replace(token=jnp.where(rows.accept, x, drawn))


def unnormalised_replacement(p, q, x, is_verify, accept_words, token_words):
    rows = textbook.verify_rows(p, q, x, is_verify, accept_words, token_words)
    points = jnp.cumsum(jnp.maximum(p - q, 0), axis=1)
    drawn = (points <= textbook.uniform(token_words)[:, None]).sum(1, dtype=jnp.int32)
    drawn = jnp.minimum(drawn, p.shape[1] - 1)
    return rows._replace(token=jnp.where(rows.accept, x, drawn))


def residual_without_clipping(p, q, x, is_verify, accept_words, token_words):
    rows = textbook.verify_rows(p, q, x, is_verify, accept_words, token_words)
    drawn = textbook.draw(jnp.abs(p - q), textbook.uniform(token_words))
    return rows._replace(token=jnp.where(rows.accept, x, drawn))


def shared_word(p, q, x, is_verify, accept_words, token_words):
    return textbook.verify_rows(p, q, x, is_verify, accept_words, accept_words)


def equal_token_shortcut(p, q, x, is_verify, accept_words, token_words):
    rows = textbook.verify_rows(p, q, x, is_verify, accept_words, token_words)
    lucky = textbook.draw(p, textbook.uniform(token_words)) == x
    return rows._replace(
        accept=rows.accept | lucky, token=jnp.where(lucky, x, rows.token)
    )


@pytest.mark.parametrize(
    "wrong",
    [
        replacement_from_p,
        unnormalised_replacement,
        residual_without_clipping,
        shared_word,
        equal_token_shortcut,
    ],
)
def test_enumeration_refuses_wrong_rules(wrong, grid_words):
    words = grid_words(PARTS)
    q = np.asarray([[1, 4, 1], [2, 2, 2], [3, 1, 2], [0, 3, 3]]) / 6
    p = np.asarray([[3, 1, 2], [1, 4, 1], [2, 2, 2], [5, 0, 1]]) / 6
    right, _ = emitted_law(verify_rows, p, q, words)
    np.testing.assert_allclose(right, p, atol=1e-6)
    law, _ = emitted_law(jax.jit(wrong), p, q, words)
    assert np.abs(law - p).max() > 1e-2, "the enumeration did not see the difference"


def test_enumeration_refuses_softmax_rows_for_greedy_drafts(grid_words):
    """q must be the one-hot that a greedy draft was really taken from."""
    words = grid_words(PARTS)
    p = np.asarray([[1, 2, 3], [2, 3, 1]]) / 6
    softmax = np.asarray([[3, 2, 1], [2, 1, 3]]) / 6
    chosen = np.eye(3)[softmax.argmax(1)]
    law, _ = emitted_law(verify_rows, p, softmax, words, draft_law=chosen)
    assert np.abs(law - p).max() > 1e-2
    law, _ = emitted_law(verify_rows, p, chosen, words)
    np.testing.assert_allclose(law, p, atol=1e-6)


@pytest.mark.parametrize("word", [0, 2**31, 2**32 - 1])
def test_ends_of_the_uniform(word):
    """Ratio 1 always stands and ratio 0 never does: the comparison is strict."""
    p = jnp.asarray([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.2, 0.8, 0.0]])
    q = jnp.asarray([[0.5, 0.5, 0.0], [0.4, 0.2, 0.4], [0.1, 0.3, 0.6]])
    x = jnp.asarray([1, 2, 1])
    words = jnp.full(3, word, jnp.uint32)
    rows = verify_rows(p, q, x, jnp.ones(3, bool), words, words)
    np.testing.assert_array_equal(rows.accept, [True, False, True])
    assert rows.token[1] in (0, 1)
    # Control: with `<=` the draft of probability zero would stand at u = 0.
    ratio = p[1, 2] / q[1, 2]
    assert (textbook.uniform(words[1]) <= ratio) == (word == 0)


def test_drafts_that_q_excludes_always_fall():
    p = jnp.asarray([[0, 1.0, 0], [0.5, 0.5, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]])
    q = jnp.asarray([[1.0, 0, 0], [1.0, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]])
    x = jnp.asarray([1, 1, -1, 3])
    words = jnp.zeros(4, jnp.uint32)
    rows = verify_rows(p, q, x, jnp.ones(4, bool), words, words)
    np.testing.assert_array_equal(rows.accept, [False] * 4)
    # One-hot p replaces from p; without any residual p is the source.
    np.testing.assert_array_equal(rows.token, [1, 1, 0, 0])


def test_fresh_rows_ignore_drafts(rng, measured_law):
    p = rng.dirichlet(np.ones(5), size=4).astype(np.float32)
    q = np.full_like(p, np.nan)

    def tokens(words):
        words = jnp.asarray(words).reshape(-1)
        rows = verify_rows(
            jnp.repeat(jnp.asarray(p), 5, 0),
            jnp.repeat(jnp.asarray(q), 5, 0),
            jnp.full(20, 3, jnp.int32),
            jnp.zeros(20, bool),
            words,
            words,
        )
        assert rows.accept.all() and (rows.accept_prob == 1).all()
        return rows.token.reshape(4, 5)

    np.testing.assert_allclose(measured_law(tokens, 4, 5), p, atol=2e-7)


def test_sampling_golden(data_dir, measured_law):
    data = np.load(data_dir / "sampling.npz")
    count, width = data["uniforms"].shape
    temperature = jnp.asarray(data["temperature"], jnp.float32)
    p = textbook.probabilities(jnp.asarray(data["target_logits"]), temperature)
    q = textbook.probabilities(jnp.asarray(data["draft_logits"]), temperature)
    p, q = jnp.repeat(p, width, 0), jnp.repeat(q, width, 0)
    every_token = jnp.tile(jnp.arange(width), count)
    verify = jnp.ones(count * width, bool)
    words = (data["uniforms"] * 2**24).astype(np.uint32) << 8
    np.testing.assert_array_equal(
        textbook.uniform(jnp.asarray(words)), data["uniforms"]
    )
    words = jnp.asarray(words.reshape(-1))

    rows = verify_rows(p, q, every_token, verify, words, words)
    accepted = np.asarray(rows.accept).reshape(count, width)
    # A draft that q excludes is accepted by the reference (ratio p / 1e-8); it
    # cannot have been drawn, and here it falls.
    drawable = data["draft_probs"] > 0
    np.testing.assert_array_equal(accepted, data["accepted"] & drawable)
    assert (data["accepted"] & ~drawable).any()
    rate = np.asarray(rows.accept_prob).reshape(count, width)
    np.testing.assert_allclose(rate[:, 0], data["accept_rate"], atol=1e-6)

    def replacements(words):
        none = jnp.full(count * width, -1, jnp.int32)
        words = jnp.asarray(words).reshape(-1)
        token = verify_rows(p, q, none, verify, words, words).token
        return token.reshape(count, width)

    law = measured_law(replacements, count, width)
    expected = data["residual_probs"]
    for name, row, want in zip(data["case_names"], law, expected, strict=True):
        np.testing.assert_allclose(row, want, atol=1e-6, err_msg=str(name))


def test_accept_probability_golden(data_dir, measured_law):
    """The chance to stand, measured over the words, equals min(1, p / q)."""
    data = np.load(data_dir / "sampling.npz")
    count, width = data["uniforms"].shape
    p = jnp.asarray(np.repeat(data["target_probs"], width, 0))
    q = jnp.asarray(np.repeat(data["draft_probs"], width, 0))
    every_token = jnp.tile(jnp.arange(width), count)

    def falls(words):
        words = jnp.asarray(words).reshape(-1)
        zeros = jnp.zeros(count * width, jnp.uint32)
        verify = jnp.ones(count * width, bool)
        accept = verify_rows(p, q, every_token, verify, words, zeros).accept
        return jnp.where(accept, 0, 1)[:, None]

    share = measured_law(falls, count * width, 1).reshape(count, width)
    drawable = data["draft_probs"] > 0
    np.testing.assert_allclose(
        share[drawable], data["accept_prob"][drawable], atol=1e-6
    )
    np.testing.assert_array_equal(share[~drawable], 0)


def test_greedy_equals_one_hot_rows(rng, random_words):
    logits = jnp.asarray(np.round(rng.normal(size=(40, 30)) * 2), jnp.float32)
    zero = jnp.zeros(40)
    p = textbook.probabilities(logits, zero)
    drafts = jnp.asarray(rng.integers(0, 30, 40), jnp.int32)
    best = jnp.argmax(logits, 1).astype(jnp.int32)
    drafts = jnp.where(jnp.arange(40) % 2 == 0, best, drafts).at[7].set(-1)
    q = jax.nn.one_hot(drafts, 30)
    fresh = jnp.arange(40) % 5 != 4
    words = random_words(0, 2, 40)
    expected = verify_rows(p, q, drafts, fresh, *words)
    rows = verify_greedy(logits, drafts, fresh)
    for a, b in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def test_greedy_unusable_row_accepts_nothing():
    rows = verify_greedy(
        jnp.full((2, 4), -jnp.inf), jnp.asarray([-1, 0]), jnp.ones(2, bool)
    )
    np.testing.assert_array_equal(rows.accept, [False, False])
    np.testing.assert_array_equal(rows.token, [-1, -1])


def share_of_token_zero(verify, p, q, drafts, words):
    count = drafts.shape[0]
    p, q = jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32)
    rows = jax.jit(verify)(
        jnp.broadcast_to(p, (count, 2)),
        jnp.broadcast_to(q, (count, 2)),
        drafts,
        jnp.ones(count, bool),
        *words,
    )
    return float((rows.token == 0).mean())


def test_fr01_greedy_draft_with_one_hot_q(random_words):
    count = 200_000
    drafts = jnp.zeros(count, jnp.int32)
    words = random_words(1, 2, count)
    p = [[0.3, 0.7]]
    share = share_of_token_zero(textbook.verify_rows, p, [[1, 0]], drafts, words)
    assert abs(share - 0.3) < 0.005
    wrong = share_of_token_zero(textbook.verify_rows, p, [[0.6, 0.4]], drafts, words)
    assert abs(wrong - 0.5) < 0.005


def test_fr02_no_shortcut_for_equal_samples(random_words):
    count = 200_000
    drafts = jnp.zeros(count, jnp.int32)
    words = random_words(2, 2, count)
    p, q = [[0.5, 0.5]], [[1, 0]]
    share = share_of_token_zero(textbook.verify_rows, p, q, drafts, words)
    assert abs(share - 0.5) < 0.005
    wrong = share_of_token_zero(equal_token_shortcut, p, q, drafts, words)
    assert abs(wrong - 0.75) < 0.005


def test_fr03_draft_rows_stay_untouched(rng, random_words):
    logits = jnp.asarray(rng.normal(size=(8, 300)), jnp.float32)
    q = textbook.probabilities(logits, jnp.ones(8))
    p = textbook.probabilities(logits[::-1], jnp.ones(8))
    before = np.array(q)
    words = random_words(3, 3, 8)
    drafts = textbook.draw(q, textbook.uniform(words[0]))
    first = verify_rows(p, q, drafts, jnp.ones(8, bool), words[1], words[2])
    second = verify_rows(p, q, drafts, jnp.ones(8, bool), words[1], words[2])
    np.testing.assert_array_equal(before.view(np.uint32), np.asarray(q).view("u4"))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_token_outside_the_support(rng, random_words):
    count, width = 4000, 6
    p = rng.dirichlet(np.full(width, 0.2), size=count)
    q = rng.dirichlet(np.full(width, 0.2), size=count)
    p[rng.random((count, width)) < 0.4] = 0
    q[rng.random((count, width)) < 0.4] = 0
    p, q = p[(p.sum(1) > 0) & (q.sum(1) > 0)], q[(p.sum(1) > 0) & (q.sum(1) > 0)]
    p = jnp.asarray(p / p.sum(1, keepdims=True), jnp.float32)
    q = jnp.asarray(q / q.sum(1, keepdims=True), jnp.float32)
    count = p.shape[0]
    words = random_words(4, 3, count)
    drafts = textbook.draw(q, textbook.uniform(words[0]))
    drafts = jnp.where(jnp.arange(count) % 7 == 0, -1, drafts)
    verify = jnp.arange(count) % 3 != 0
    rows = verify_rows(p, q, drafts, verify, words[1], words[2])
    emitted = np.asarray(p)[np.arange(count), np.asarray(rows.token)]
    assert np.all(np.asarray(rows.token) >= 0) and np.all(emitted > 0)


def test_rows_do_not_depend_on_other_rows(rng, random_words):
    count, width = 13, 1003
    p = rng.dirichlet(np.full(width, 0.3), size=count).astype(np.float32)
    q = rng.dirichlet(np.full(width, 0.3), size=count).astype(np.float32)
    words = np.asarray(random_words(5, 3, count))
    drafts = np.asarray(
        textbook.draw(jnp.asarray(q), textbook.uniform(jnp.asarray(words[0])))
    )
    args = (p, q, drafts, np.arange(count) % 4 != 3, words[1], words[2])
    whole = verify_rows(*args)
    order = rng.permutation(count)
    for pick in (order, *(np.arange(n) for n in (1, 2, 6))):
        part = verify_rows(*(x[pick] for x in args))
        for a, b in zip(part, whole, strict=True):
            np.testing.assert_array_equal(a, np.asarray(b)[pick])


def test_shapes_are_checked():
    p = jnp.zeros((3, 5), jnp.int32)
    ids = jnp.zeros(3, jnp.int32)
    verify = jnp.ones(3, bool)
    with pytest.raises(ValueError, match="`q` has shape"):
        pk.verify_rows(p, p[:, :4], ids, ids, verify, ids)
    with pytest.raises(ValueError, match="`offsets` has shape"):
        pk.verify_rows(p, p, ids, ids[:2], verify, ids)
    with pytest.raises(ValueError, match="`q` is float32"):
        pk.verify_rows(p, p.astype(jnp.float32), ids, ids, verify, ids)
    with pytest.raises(ValueError, match="`draft_ids` has shape"):
        pk.verify_greedy(p.astype(jnp.float32), ids[:1], verify)
