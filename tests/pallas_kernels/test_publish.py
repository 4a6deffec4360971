"""Publication on the padded layout, and the law of whole emitted lines."""

import itertools
from collections import Counter
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

publish = jax.jit(pk.publish)
verify_rows = jax.jit(pk.verify_rows)


def run(accept, token, drafts, *, n=None, stop=(-1,), remaining=99, active=True):
    """Publishes one request whose rows are all real."""
    width = len(token)
    return jax.tree.map(
        lambda x: np.asarray(x)[0].tolist(),
        publish(
            jnp.asarray([accept], bool),
            jnp.asarray([token], jnp.int32),
            jnp.asarray([drafts], jnp.int32).reshape(1, width - 1),
            jnp.asarray([width - 1 if n is None else n], jnp.int32),
            jnp.asarray([stop], jnp.int32),
            jnp.asarray([remaining], jnp.int32),
            jnp.asarray([active]),
        ),
    )


# Golden ids override verdicts after sampling; the padded form does not offer them.
NO_OVERRIDE = "overrides by golden ids are not part of the padded form"


def pad_packed(case):
    """A packed case of the reference file on the padded layout."""
    sizes = case["seqlens_q"]
    width = max(sizes)
    starts = np.cumsum([0, *sizes[:-1]])
    rng = np.random.default_rng(0)
    accept = rng.random((len(sizes), width)) < 0.5
    token = rng.integers(0, 9, (len(sizes), width)).astype(np.int32)
    drafts = rng.integers(0, 9, (len(sizes), width)).astype(np.int32)
    for r, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = slice(start, start + size)
        accept[r, :size] = case["raw_accept"][rows]
        token[r, :size] = case["candidate_ids"][rows]
        drafts[r, : size - 1] = case["draft_ids_by_row"][rows][:-1]
    return dict(
        accept=jnp.asarray(accept),
        token=jnp.asarray(token),
        draft_ids=jnp.asarray(drafts[:, :-1]),
        n_drafts=jnp.asarray(sizes, jnp.int32) - 1,
        stop_ids=jnp.asarray(case["stop_ids"], jnp.int32),
        remaining=jnp.full(len(sizes), 99, jnp.int32),
        active=jnp.ones(len(sizes), bool),
    )


def test_publication_golden(golden):
    checked, skipped = 0, []
    for case in golden("publication")["cases"]:
        overridden = case["golden"] is not None and max(case["golden"]) >= 0
        if overridden:
            skipped.append((case["name"], NO_OVERRIDE))
            continue
        given = pad_packed(case)
        # Uncut lines: the reference cuts at a stop id on the host, later.
        given_uncut = given | dict(stop_ids=jnp.full_like(given["stop_ids"], -1))
        result = publish(**given_uncut)
        expected = case["expected"]
        offsets = expected["last_valid_offset"]
        np.testing.assert_array_equal(result.n_accepted, offsets, case["name"])
        np.testing.assert_array_equal(result.n_emitted, np.asarray(offsets) + 1)
        np.testing.assert_array_equal(
            result.next_token, expected["sampled_token_ids"], case["name"]
        )
        assert not result.stopped.any()
        emitted = np.asarray(result.emitted)
        for r, (start, size) in enumerate(
            zip(expected["ftp"], case["seqlens_q"], strict=True)
        ):
            verified = expected["verified_token_ids"][start : start + size]
            kept = offsets[r]
            assert verified[kept:] == [-1] * (size - kept)
            assert emitted[r, :kept].tolist() == verified[:kept]
            assert np.all(emitted[r, kept + 1 :] == -1)

        cut = publish(**given)
        np.testing.assert_array_equal(cut.stopped, expected["emitted_stop_token"])
        np.testing.assert_array_equal(cut.n_accepted, offsets)
        for line, whole, stop, n in zip(
            np.asarray(cut.emitted),
            emitted,
            case["stop_ids"],
            np.asarray(cut.n_emitted),
            strict=True,
        ):
            ends = [i for i, t in enumerate(whole) if t >= 0 and t in stop]
            assert n == (ends[0] + 1 if ends else (whole >= 0).sum())
            np.testing.assert_array_equal(line[:n], whole[:n])
            assert np.all(line[n:] == -1)
        checked += 1
    assert checked >= 15 and len(skipped) >= 3, (checked, skipped)


def test_fr10_stop_in_a_rejected_draft_stops_nothing():
    eos = 2
    result = run([True, False, True, True], [5, 9, 6, 7], [5, eos, 6], stop=[eos])
    assert result.emitted == [5, 9, -1, -1]
    assert not result.stopped and result.next_token == 9 and result.n_accepted == 1


def test_fr13_counters_end_at_the_stop():
    eos = 2
    result = run([True] * 5, [11, eos, 12, 13, 14], [11, eos, 12, 13], stop=[eos])
    assert result.emitted == [11, eos, -1, -1, -1]
    assert (result.n_emitted, result.n_kept_drafts, result.n_accepted) == (2, 2, 4)
    assert result.stopped and result.next_token == eos


def test_fr56_drafts_behind_the_stop_do_not_count():
    result = run([True] * 6, [1, 2, 7, 4, 5, 6], [1, 2, 7, 4, 5], stop=[-1, 7])
    assert (result.n_emitted, result.n_kept_drafts) == (3, 3)


def test_stop_as_replacement_and_as_fresh_token():
    result = run([True, False, True], [4, 2, 8], [4, 5], stop=[2])
    assert result.stopped and result.emitted == [4, 2, -1] and result.n_kept_drafts == 1
    result = run([True, True, True], [4, 5, 2], [4, 5], stop=[2])
    assert result.stopped and result.emitted == [4, 5, 2]


def test_budget_cuts_and_a_stop_behind_it_stops_nothing():
    args = [True] * 4, [4, 5, 2, 8], [4, 5, 2]
    result = run(*args, stop=[2], remaining=2)
    assert result.emitted == [4, 5, -1, -1] and not result.stopped
    assert (result.n_emitted, result.n_kept_drafts, result.n_accepted) == (2, 2, 3)
    result = run(*args, stop=[2], remaining=3)
    assert result.stopped and result.n_emitted == 3
    for remaining in (0, -1):
        result = run(*args, remaining=remaining)
        assert result.emitted == [-1] * 4 and result.next_token == 0
        assert (result.n_emitted, result.n_kept_drafts) == (0, 0)


def test_inactive_requests_emit_nothing():
    result = run([True] * 3, [4, 5, 6], [4, 5], stop=[5], active=False)
    assert result.emitted == [-1] * 3 and not result.stopped
    assert result.n_emitted == result.n_accepted == result.n_kept_drafts == 0
    assert result.next_token == 0


def test_rows_behind_the_fresh_row_are_padding():
    result = run([True] * 4, [4, 8, 2, 2], [4, 2, 2], n=1, stop=[2])
    assert result.emitted == [4, 8, -1, -1] and not result.stopped
    assert result.n_accepted == 1
    assert run([True], [3], []).emitted == [3]


def test_minus_one_is_never_a_stop():
    result = run([True, True], [-1, 3], [-1], stop=[-1])
    assert not result.stopped and result.n_emitted == 2


def test_shapes_are_checked():
    good = dict(
        accept=jnp.ones((2, 3), bool),
        token=jnp.zeros((2, 3), jnp.int32),
        draft_ids=jnp.zeros((2, 2), jnp.int32),
        n_drafts=jnp.zeros(2, jnp.int32),
        stop_ids=jnp.zeros((2, 1), jnp.int32),
        remaining=jnp.zeros(2, jnp.int32),
        active=jnp.ones(2, bool),
    )
    pk.publish(**good)
    for name, bad in (
        ("draft_ids", jnp.zeros((2, 3), jnp.int32)),
        ("stop_ids", jnp.zeros(2, jnp.int32)),
        ("active", jnp.ones(3, bool)),
        ("token", jnp.zeros((2, 0), jnp.int32)),
    ):
        with pytest.raises(ValueError, match=f"`{name}` has shape"):
            pk.publish(**good | {name: bad})


# ---------------------------------------------------------------- the chain


PARTS = 20  # every threshold and every residual share of the chain is a grid point


def first_order(data):
    """The chain's rows; index 3 stands for 'no token before'."""
    keys = ("0", "1", "2", "None")
    return np.asarray([[float(Fraction(v)) for v in data[key]] for key in keys])


def line_law(p, q, k, words):
    """Exact law of the emitted line with k drafts, by enumeration.

    Goes over all drafts, all accept words of all rows jointly and all token words.
    One token word serves all rows of a case: only the final row's is used.
    """
    n = len(words)
    where = np.indices((4, 3, n, n)).reshape(4, -1)
    judged = verify_rows(
        jnp.asarray(p, jnp.float32)[where[0]],
        jnp.asarray(q, jnp.float32)[where[0]],
        jnp.asarray(where[1], jnp.int32),
        jnp.ones(where.shape[1], bool),
        jnp.asarray(words)[where[2]],
        jnp.asarray(words)[where[3]],
    )
    fresh = verify_rows(
        jnp.repeat(jnp.asarray(p, jnp.float32), n, 0),
        jnp.zeros((4 * n, 3)),
        jnp.full(4 * n, -1, jnp.int32),
        jnp.zeros(4 * n, bool),
        jnp.zeros(4 * n, jnp.uint32),
        jnp.tile(jnp.asarray(words), 4),
    )
    accept = np.asarray(judged.accept).reshape(4, 3, n, n)
    token = np.asarray(judged.token).reshape(4, 3, n, n)
    fresh_token = np.asarray(fresh.token).reshape(4, n)

    grid = np.indices((n,) * (k + 1)).reshape(k + 1, -1)
    cases = grid.shape[1]
    law: Counter = Counter()
    for drafts in itertools.product(range(3), repeat=k):
        before = (3, *drafts)
        weight = np.prod([q[b, x] for b, x in zip(before, drafts, strict=False)])
        if weight == 0:
            continue
        rows = [(before[j], drafts[j], grid[j], grid[k]) for j in range(k)]
        accepts = [accept[r] for r in rows] + [np.ones(cases, bool)]
        tokens = [token[r] for r in rows] + [fresh_token[before[k], grid[k]]]
        line = publish(
            jnp.asarray(np.stack(accepts, 1)),
            jnp.asarray(np.stack(tokens, 1)),
            jnp.asarray(np.broadcast_to(np.int32(drafts), (cases, k))),
            jnp.full(cases, k, jnp.int32),
            jnp.full((cases, 1), -1, jnp.int32),
            jnp.full(cases, 99, jnp.int32),
            jnp.ones(cases, bool),
        )
        emitted = np.asarray(line.emitted)
        np.testing.assert_array_equal((emitted >= 0).sum(1), line.n_emitted)
        code = ((emitted + 1) * 4 ** np.arange(k + 1)).sum(1)
        for value, count in zip(*np.unique(code, return_counts=True), strict=True):
            digits = [value // 4**j % 4 - 1 for j in range(k + 1)]
            key = " ".join(str(d) for d in digits if d >= 0)
            law[key] += weight * count / cases
    return law


@pytest.mark.parametrize("k", [0, 1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_chain_is_lossless(k, golden, grid_words):
    data = golden("chain_exact")
    p = first_order(data["target_first_order"])
    q = first_order(data["draft_first_order"])
    law = line_law(p, q, k, grid_words(PARTS))

    case = data["rounds"][k]
    assert case["drafts_verified"] == k
    expected = case["emitted_distribution_standard"]
    assert set(law) == set(expected)
    for line, share in expected.items():
        assert law[line] == pytest.approx(float(Fraction(share)), abs=1e-9), line
    mean = sum(share * len(line.split()) for line, share in law.items())
    assert mean == pytest.approx(float(Fraction(case["expected_emitted_tokens"])))

    # The rest of four tokens by plain sampling: the joint law is the target's.
    whole: Counter = Counter()
    for line, share in law.items():
        first = [int(t) for t in line.split()]
        for rest in itertools.product(range(3), repeat=4 - len(first)):
            tokens = first + list(rest)
            for a, b in zip(tokens[len(first) - 1 :], rest, strict=False):
                share_of_rest = p[a, b]
                share *= share_of_rest
            whole[" ".join(map(str, tokens))] += share
            share = law[line]
    for line, share in data["target_four_token_distribution"].items():
        assert whole.pop(line) == pytest.approx(float(Fraction(share)), abs=1e-9)
    assert sum(whole.values()) == pytest.approx(0, abs=1e-12)


def test_chain_control_wrong_q_is_seen(golden, grid_words):
    """Control: drafts judged with another row than theirs change the line's law."""
    data = golden("chain_exact")
    p = first_order(data["target_first_order"])
    q = first_order(data["draft_first_order"])
    wrong = q.copy()
    wrong[3] = [0.4, 0.4, 0.2]
    n = len(grid_words(PARTS))
    assert n == PARTS
    right = line_law(p, q, 1, grid_words(PARTS))
    other = line_law(p, wrong, 1, grid_words(PARTS))
    # Weighted by the wrong row the drafts would be right again; only the verdicts on
    # the true drafts matter here.
    assert max(abs(right[x] - other[x]) for x in right) > 1e-2
