"""The integer rule: every point of small rows, so the law is counted, not sampled."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fixed_point import scale_of
from pallas_kernels.integer_rows import TOTAL, integer_rows, points
from pallas_kernels.locate import locate, locate_offset
from pallas_kernels.verify import reference
from pallas_kernels.vocab_axis import take

SIXTHS = np.asarray(
    [row for row in itertools.product(range(7), repeat=3) if sum(row) == 6], np.int32
)


def emitted(verify, p, q, total, *, constant_offset=False):
    """Counts of emitted tokens and of accepted points, for pairs of rows.

    Every point of [0, total) draws a draft from `q`, which `verify` then judges.
    """
    count = len(p)
    point = np.tile(np.arange(total, dtype=np.int32), count)
    row = np.repeat(np.arange(count), total)
    p_rows, q_rows = jnp.asarray(p)[row], jnp.asarray(q)[row]
    draft, offset = jax.jit(locate_offset)(q_rows, jnp.asarray(point))
    if constant_offset:
        offset = jnp.zeros_like(offset)
    result = jax.jit(lambda *args: verify(*args, total=total))(
        p_rows, q_rows, draft, offset, jnp.ones(len(row), bool), jnp.asarray(point)
    )
    token = np.asarray(result.token).reshape(count, total)
    law = np.stack([(token == t).sum(1) for t in range(p.shape[1])], 1)
    return law, np.asarray(result.accept).reshape(count, total).sum(1), result


def pairs():
    first, second = np.indices((len(SIXTHS),) * 2).reshape(2, -1)
    return SIXTHS[first], SIXTHS[second]


def test_every_point_of_every_pair_in_sixths(golden):
    p, q = pairs()
    law, accepted, result = emitted(reference.verify_rows, p, q, 6)
    np.testing.assert_array_equal(law, p)
    kept = np.minimum(p, q).sum(1)
    np.testing.assert_array_equal(accepted, kept)
    share = np.asarray(result.accept_prob).reshape(-1, 6)[:, 0]
    np.testing.assert_allclose(share, kept / 6, atol=1e-7)
    known = {
        (tuple(row[0]), tuple(row[1])): Fraction(row[2])
        for row in golden("one_position_grid")["rows"]
    }
    assert len(known) == len(p)
    for one, other, count in zip(p.tolist(), q.tolist(), accepted, strict=True):
        assert known[tuple(one), tuple(other)] == Fraction(int(count), 6)


def test_rows_of_other_totals_are_compared_on_a_common_one(golden):
    """Cross-multiplied, rows of any totals have one; every point again."""
    cases = golden("integer_exact_mode")["cases"]
    small = [case for case in cases if sum(case["target_weights"]) < 100]
    assert len(small) == len(cases) - 1  # One has 2^62 points.
    for case in small:
        p, q = (np.asarray(case[k + "_weights"]) for k in ("target", "draft"))
        p, q = p * q.sum(), q * p.sum()
        total = int(p.sum())
        law, _, result = emitted(
            reference.verify_rows, p[None].astype("i4"), q[None].astype("i4"), total
        )
        np.testing.assert_array_equal(law[0], p)
        residual = [int(x) for x in case["residual_weights_cross_multiplied"]]
        np.testing.assert_array_equal(np.maximum(p - q, 0), residual)
        drafted = np.repeat(np.arange(len(q)), q)
        for x, up, down in zip(
            range(len(q)),
            case["accept_numerators"],
            case["accept_denominators"],
            strict=True,
        ):
            if q[x]:
                share = np.asarray(result.accept)[drafted == x].mean()
                expected = min(1, Fraction(int(up), int(down)))
                np.testing.assert_allclose(share, float(expected), rtol=1e-12)


def test_a_position_is_one_to_one(rng):
    """The rule only moves points: larger rows, every point, exact counts."""
    total = 5000
    p = rng.multinomial(total, rng.dirichlet(np.full(40, 0.3), 4)[0], 4)
    q = rng.multinomial(total, rng.dirichlet(np.full(40, 0.3), 4)[0], 4)
    p, q = p.astype(np.int32), q.astype(np.int32)
    law, accepted, _ = emitted(reference.verify_rows, p, q, total)
    np.testing.assert_array_equal(law, p)
    np.testing.assert_array_equal(accepted, np.minimum(p, q).sum(1))


def residual_from_p(p, q, x, offset, verify, point, *, total):
    rows = reference.verify_rows(p, q, x, offset, verify, point, total=total)
    return rows._replace(token=jnp.where(rows.accept, x, locate(p, offset)))


def rank_one_off(p, q, x, offset, verify, point, *, total):
    rows = reference.verify_rows(p, q, x, offset, verify, point, total=total)
    before = jnp.arange(p.shape[1])[None] < x[:, None]
    rank = jnp.where(before, jnp.maximum(q - p, 0), 0).sum(1) + offset - take(p, x)
    token = locate(jnp.maximum(p - q, 0), rank + 1)
    return rows._replace(token=jnp.where(rows.accept, x, token))


def offset_alone(p, q, x, offset, verify, point, *, total):
    """Without what fell before x, different drafts take the same residual units."""
    rows = reference.verify_rows(p, q, x, offset, verify, point, total=total)
    token = locate(jnp.maximum(p - q, 0), jnp.maximum(offset - take(p, x), 0))
    return rows._replace(token=jnp.where(rows.accept, x, token))


def accepts_at_equality(p, q, x, offset, verify, point, *, total):
    rows = reference.verify_rows(p, q, x, offset, verify, point, total=total)
    accept = rows.accept | (offset == take(p, x))
    return rows._replace(accept=accept, token=jnp.where(accept, x, rows.token))


def no_tail_mask(p, q, x, offset, verify, point, *, total):
    """A padded column that carries weight stands for a missing mask."""
    rows = reference.verify_rows(p, q, x, offset, verify, point, total=total)
    wide = jnp.maximum(p - q, 0).at[:, -1].add(1)
    token = locate(wide, jnp.minimum(offset, wide.sum(1) - 1))
    return rows._replace(token=jnp.where(rows.accept, x, token))


@pytest.mark.parametrize(
    "wrong",
    [residual_from_p, rank_one_off, offset_alone, accepts_at_equality, no_tail_mask],
)
def test_counting_refuses_wrong_rules(wrong, rng):
    # Four tokens: of three, two that fall leave one residual token, and every rank
    # of theirs takes it.
    rows = [row for row in itertools.product(range(7), repeat=4) if sum(row) == 6]
    p, q = np.asarray(rows, np.int32)[rng.integers(0, len(rows), (2, 500))]
    law, _, _ = emitted(reference.verify_rows, p, q, 6)
    np.testing.assert_array_equal(law, p)
    law, _, _ = emitted(wrong, p, q, 6)
    assert (law != p).any(), "the count did not see the difference"


def test_a_chosen_draft_needs_a_free_offset():
    """A one-hot q: its offset is the point itself; a constant one breaks the law."""
    p = SIXTHS
    for chosen in range(3):
        q = np.zeros_like(p)
        q[:, chosen] = 6
        law, _, _ = emitted(reference.verify_rows, p, q, 6)
        np.testing.assert_array_equal(law, p)
        stuck, _, _ = emitted(reference.verify_rows, p, q, 6, constant_offset=True)
        assert (stuck != p).any()


def test_a_draft_that_was_not_drawn_falls_and_p_is_drawn():
    total, p = 6, np.repeat(SIXTHS[:, None], 6, 1).reshape(-1, 3)
    q = np.zeros_like(p)
    q[:, 0] = total
    offset = jnp.asarray(np.tile(np.arange(total, dtype=np.int32), len(SIXTHS)))
    verify = jnp.ones(len(p), bool)
    # q excludes token 1; -1 is no token; both are judged by the offset's own token.
    for draft in (1, -1):
        rows = reference.verify_rows(
            jnp.asarray(p), jnp.asarray(q), jnp.full(len(p), draft, jnp.int32), offset,
            verify, jnp.zeros_like(offset), total=total,
        )  # fmt: skip
        assert not np.asarray(rows.accept).any()
        token = np.asarray(rows.token).reshape(-1, total)
        law = np.stack([(token == t).sum(1) for t in range(3)], 1)
        np.testing.assert_array_equal(law, SIXTHS)
    # All of q is token 0, but no point lies in front of it.
    rows = reference.verify_rows(
        jnp.asarray(p), jnp.asarray(q), jnp.zeros(len(p), jnp.int32), -1 - offset,
        verify, offset, total=total,
    )  # fmt: skip
    assert not np.asarray(rows.accept).any()
    np.testing.assert_array_equal(rows.token, (p > 0).argmax(1))


def test_fresh_rows_draw_from_p_by_their_own_point():
    p = np.repeat(SIXTHS, 6, 0)
    point = jnp.asarray(np.tile(np.arange(6, dtype=np.int32), len(SIXTHS)))
    rows = reference.verify_rows(
        jnp.asarray(p), jnp.full(p.shape, -7, jnp.int32),
        jnp.full(len(p), 2, jnp.int32),
        jnp.zeros(len(p), jnp.int32), jnp.zeros(len(p), bool), point, total=6,
    )  # fmt: skip
    assert np.asarray(rows.accept).all() and (np.asarray(rows.accept_prob) == 1).all()
    token = np.asarray(rows.token).reshape(-1, 6)
    law = np.stack([(token == t).sum(1) for t in range(3)], 1)
    np.testing.assert_array_equal(law, SIXTHS)


def test_equal_rows_never_reject(rng):
    p = rng.multinomial(500, np.full(20, 0.05), 3).astype(np.int32)
    _, accepted, _ = emitted(reference.verify_rows, p, p, 500)
    np.testing.assert_array_equal(accepted, 500)


def test_unusable_rows_give_no_token():
    zero = jnp.zeros((2, 4), jnp.int32)
    rows = reference.verify_rows(
        zero, zero.at[:, 1].set(TOTAL), jnp.asarray([1, 1]), jnp.asarray([5, 5]),
        jnp.asarray([True, False]), jnp.asarray([3, 3]),
    )  # fmt: skip
    np.testing.assert_array_equal(rows.token, [-1, -1])
    assert not rows.accept[0]


def step(target, draft, scale, words, axis_name=None):
    p = integer_rows(target, scale, axis_name=axis_name)
    q = integer_rows(draft, scale, axis_name=axis_name)
    ids, offset = locate_offset(q, points(words[0]), axis_name)
    verify = jnp.arange(len(scale)) % 4 != 3
    rows = reference.verify_rows(
        p, q, ids, offset, verify, points(words[1]), axis_name=axis_name
    )
    return (ids, offset, *rows)


def inputs(rng, rows, width):
    target = rng.normal(size=(rows, width)) * 3
    draft = target + rng.normal(size=(rows, width))
    scale = scale_of(rng.choice([0.0, 0.5, 1.0], rows))
    words = rng.integers(0, 2**32, (2, rows), np.uint64)
    return (
        jnp.asarray(target, jnp.float32),
        jnp.asarray(draft, jnp.float32),
        jnp.asarray(scale),
        jnp.asarray(words, jnp.uint32),
    )


@pytest.mark.parametrize("width", [64, 1204, 5000])
def test_split_vocabulary_and_batch_order_change_no_bit(rng, vocab_mesh, width):
    rows, whole = jax.P(None, "vocab"), jax.P()
    split = jax.jit(
        jax.shard_map(
            lambda *args: step(*args, axis_name="vocab"),
            mesh=vocab_mesh,
            in_specs=(rows, rows, whole, whole),
            out_specs=whole,
        )
    )
    args = inputs(rng, 24, width)
    expected = jax.jit(step)(*args)
    for name, a, b in zip(NAMES, split(*args), expected, strict=True):
        np.testing.assert_array_equal(a, b, name)
    fresh = np.arange(24) % 4 == 3
    shuffled = np.arange(24)
    shuffled[~fresh] = rng.permutation(shuffled[~fresh])
    shuffled[fresh] = rng.permutation(shuffled[fresh])
    moved = jax.jit(step)(*(x[shuffled] for x in args[:3]), args[3][:, shuffled])
    for name, a, b in zip(NAMES, moved, expected, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b)[shuffled], name)


NAMES = ("draft", "offset", "accept", "token", "accept_prob")
