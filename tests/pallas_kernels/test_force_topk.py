"""Verification on selected logits: alignment, and every point of the cut law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.locate import locate_offset
from pallas_kernels.verify import force_topk

align = jax.jit(force_topk.align)
verify = jax.jit(force_topk.verify_rows, static_argnames="total")


def test_selection_is_by_logit_then_id():
    logits = jnp.asarray([[1.0, 3.0, 3.0, -jnp.inf, 2.0]])
    values, ids = force_topk.select_topk(logits, 3)
    assert ids.tolist() == [[1, 2, 4]] and values.tolist() == [[3.0, 3.0, 2.0]]
    for count in (0, 6):
        with pytest.raises(ValueError, match="allowed: 1 .. 5"):
            force_topk.select_topk(logits, count)


def test_alignment_golden(golden):
    for case in golden("force_topk_remap")["cases"]:
        # Any weights do; their order is the golden's.
        logs = np.asarray([float(x) for x in case["draft_logprobs"]])
        weights = np.rint(np.exp(logs) * 2**20).astype(np.int32)
        got = align(
            jnp.asarray(weights[None]),
            jnp.asarray([case["draft_index"]], jnp.int32),
            jnp.asarray([case["draft_token"]], jnp.int32),
            jnp.asarray([case["target_index"]], jnp.int32),
        )
        assert int(got.place[0]) == case["draft_local_id"], case["name"]
        expected = np.asarray([float(x) for x in case["aligned_logprobs"]])
        np.testing.assert_allclose(
            np.asarray(got.rows[0]) / 2**20, np.exp(expected), atol=1e-6
        )
        outside = 1 - np.exp(expected).sum()
        np.testing.assert_allclose(
            outside, case["draft_mass_outside_target"], atol=1e-6
        )


def law(p, chosen, q, drafted, total, spoil=lambda aligned: aligned):
    """Counts of emitted ids over all points of one row."""
    point = jnp.arange(total, dtype=jnp.int32)

    def rows(x):
        return jnp.asarray(np.tile(x, (total, 1)), jnp.int32)

    spot, offset = locate_offset(rows(q), point)
    ids = jnp.asarray(drafted, jnp.int32)[spot]
    aligned = spoil(align(rows(q), rows(drafted), ids, rows(chosen)))
    result = verify(
        rows(p), aligned, rows(chosen), ids, offset, jnp.ones(total, bool), point,
        total=total,
    )  # fmt: skip
    accepted = np.asarray(result.accept)
    assert not accepted[np.asarray(aligned.place) < 0].any()
    counts = np.bincount(np.asarray(result.token), minlength=12)
    return counts[chosen], result


def cases(rng, total, count=25):
    for _ in range(count):
        chosen, drafted = (rng.permutation(12)[:5] for _ in range(2))
        p, q = (rng.multinomial(total, rng.dirichlet(np.ones(5))) for _ in range(2))
        yield p, chosen, q, drafted


def test_every_point_gives_the_cut_law(rng):
    total = 200
    for p, chosen, q, drafted in cases(rng, total):
        counts, result = law(p, chosen, q, drafted, total)
        np.testing.assert_array_equal(counts, p)
        both = {i: w for i, w in zip(drafted, q, strict=True)}
        kept = sum(min(w, both.get(i, 0)) for i, w in zip(chosen, p, strict=True))
        assert int(result.accept.sum()) == kept
        np.testing.assert_allclose(result.accept_prob, kept / total, rtol=1e-6)


def test_rows_that_judge_nothing_and_drafts_that_were_not_drawn():
    p = jnp.asarray([[3, 2, 1]] * 5, jnp.int32).at[3].set(0)
    q = jnp.asarray([[1, 3, 2]] * 5, jnp.int32)
    chosen = jnp.asarray([[7, 9, 4]] * 5, jnp.int32)
    drafted = jnp.asarray([[9, 5, 7]] * 5, jnp.int32)
    # Fresh; not in the draft's selection; behind its interval; no law; drawn.
    ids = jnp.asarray([7, 4, 5, 5, 5], jnp.int32)
    offsets = jnp.asarray([1, 0, 3, 0, 2], jnp.int32)
    verify_row = jnp.arange(5) > 0
    aligned = align(q, drafted, ids, chosen)
    assert aligned.width.tolist() == [2, 0, 3, 3, 3]
    points = jnp.full(5, 5, jnp.int32)
    rows = verify(p, aligned, chosen, ids, offsets, verify_row, points, total=6)
    assert rows.accept.tolist() == [True, False, False, False, False]
    # The last is the third of three points that fall: p - q is 1, 1, 1.
    assert rows.token.tolist() == [4, 7, 9, -1, 4]
    np.testing.assert_allclose(rows.accept_prob, [1, 0.5, 0.5, 0, 0.5], rtol=1e-6)


def test_control_outside_drafts_without_numbers_of_their_own(rng):
    total, wrong = 200, 0
    for p, chosen, q, drafted in cases(rng, total):
        counts, _ = law(
            p, chosen, q, drafted, total,
            lambda aligned: aligned._replace(before=aligned.before * 0),
        )  # fmt: skip
        wrong += (counts != p).any()
    assert wrong
