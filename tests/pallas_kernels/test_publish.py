"""Publication on the padded layout, and the law of whole emitted lines."""

import itertools
from collections import defaultdict
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels.verify import textbook

publish = jax.jit(pk.publish)
verify_rows = jax.jit(textbook.verify_rows)


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


def pad_packed(case, batch, width):
    """A packed case on the padded layout; inactive requests behind the real ones."""
    sizes = case["seqlens_q"]
    starts = np.cumsum([0, *sizes[:-1]])
    # Whatever stands in the padding must not matter.
    rng = np.random.default_rng(0)
    accept = rng.random((batch, width)) < 0.5
    token = rng.integers(0, 9, (batch, width)).astype(np.int32)
    drafts = rng.integers(0, 9, (batch, width)).astype(np.int32)
    forced = np.full((batch, width), -1, np.int32)
    stops = rng.integers(0, 9, (batch, len(case["stop_ids"][0]))).astype(np.int32)
    n_drafts = rng.integers(0, width, batch).astype(np.int32)
    for r, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = slice(start, start + size)
        accept[r, :size] = case["raw_accept"][rows]
        token[r, :size] = case["candidate_ids"][rows]
        drafts[r, : size - 1] = case["draft_ids_by_row"][rows][:-1]
        stops[r] = case["stop_ids"][r]
        n_drafts[r] = size - 1
        if case["golden"] is not None:
            forced[r, :size] = case["golden"][rows]
    drafts = jnp.asarray(drafts[:, :-1])
    accept, token = pk.override(
        jnp.asarray(accept), jnp.asarray(token), drafts, jnp.asarray(forced)
    )
    return dict(
        accept=accept,
        token=token,
        draft_ids=drafts,
        n_drafts=jnp.asarray(n_drafts),
        stop_ids=jnp.asarray(stops),
        remaining=jnp.full(batch, 99, jnp.int32),
        active=jnp.asarray(np.arange(batch) < len(sizes)),
    )


def test_publication_golden(golden):
    cases = golden("publication")["cases"]
    batch = max(len(case["seqlens_q"]) for case in cases)
    width = max(max(case["seqlens_q"]) for case in cases)
    for case in cases:
        sizes, expected = case["seqlens_q"], case["expected"]
        real = len(sizes)
        offsets = np.asarray(expected["last_valid_offset"])
        given = pad_packed(case, batch, width)
        # First without stop ids: the reference cuts on the host, later.
        none = jnp.full_like(given["stop_ids"], -1)
        whole = jax.tree.map(np.asarray, publish(**given | dict(stop_ids=none)))
        assert np.all(whole.n_emitted[real:] == 0) and not whole.stopped.any()
        np.testing.assert_array_equal(whole.n_accepted[:real], offsets)
        np.testing.assert_array_equal(whole.n_emitted[:real], offsets + 1)
        np.testing.assert_array_equal(
            whole.next_token[:real], expected["sampled_token_ids"], case["name"]
        )
        for line, start, size, kept in zip(
            whole.emitted, expected["ftp"], sizes, offsets, strict=False
        ):
            verified = expected["verified_token_ids"][start : start + size]
            assert verified[kept:] == [-1] * (size - kept)
            assert line[:kept].tolist() == verified[:kept]
            assert np.all(line[kept + 1 :] == -1)

        cut = jax.tree.map(np.asarray, publish(**given))
        stopped = expected["emitted_stop_token"]
        np.testing.assert_array_equal(cut.stopped[:real], stopped, case["name"])
        assert not cut.stopped[real:].any()
        np.testing.assert_array_equal(cut.n_accepted, whole.n_accepted)
        for line, full, n, stop in zip(
            cut.emitted, whole.emitted, cut.n_emitted, case["stop_ids"], strict=False
        ):
            ends = [i for i, t in enumerate(full) if t >= 0 and t in stop]
            assert n == (ends[0] + 1 if ends else (full >= 0).sum())
            np.testing.assert_array_equal(line[:n], full[:n])
            assert np.all(line[n:] == -1)
    assert len(cases) == 30


def test_confidence_error_golden(golden):
    for case in golden("publication")["cases"]:
        sizes, starts = case["seqlens_q"], case["expected"]["ftp"]
        shape = (len(sizes), max(sizes))
        # What lies behind a request's drafts does not count.
        prob, confidence = np.full(shape, 9, np.float32), np.zeros(shape, np.float32)
        for r, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            prob[r, :size] = case["accept_probs"][start : start + size]
            confidence[r, :size] = case["confidence"][start : start + size]
        got = pk.confidence_error(
            jnp.asarray(prob),
            jnp.asarray(confidence[:, :-1]),
            jnp.asarray(sizes, jnp.int32) - 1,
        )
        expected = case["expected"]["confidence_error_sum"]
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_override_is_refused_at_another_size():
    flags = jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match="like `token`"):
        pk.override(
            flags, jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 2), jnp.int32),
            jnp.full((2, 2), -1),
        )  # fmt: skip


def test_override_of_the_first_id_and_of_the_row_without_a_draft():
    accept, token = pk.override(
        jnp.asarray([[True, False, True]]), jnp.asarray([[5, 6, 7]]),
        jnp.asarray([[3, 0]]), jnp.asarray([[0, 0, 0]]),
    )  # fmt: skip
    assert accept.tolist() == [[False, True, False]]
    assert token.tolist() == [[0, 0, 0]]


def test_confidence_error_of_a_round_without_drafts():
    none = jnp.zeros((2, 0), jnp.float32)
    assert pk.confidence_error(jnp.ones((2, 1)), none, jnp.zeros(2, jnp.int32)) == 0


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


PARTS = 20  # every threshold and every residual share of the chain is a grid point


def first_order(data):
    """The chain's rows; index 3 stands for 'no token before'."""
    keys = ("0", "1", "2", "None")
    return np.asarray([[float(Fraction(v)) for v in data[key]] for key in keys])


def line_law(p, q, k, words, drafted_by=None):
    """Exact law of the emitted line with k drafts, by enumeration.

    Goes over all drafts, all accept words of all rows jointly and all token words.
    One token word serves all rows of a case: only the final row's is used.
    `drafted_by` is what the drafts follow if not `q`.
    """
    n = len(words)
    source = q if drafted_by is None else drafted_by
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
    law: defaultdict[str, float] = defaultdict(float)
    for drafts in itertools.product(range(3), repeat=k):
        before = (3, *drafts)
        weight = np.prod([source[b, x] for b, x in zip(before, drafts, strict=False)])
        if weight == 0:
            continue
        rows = [(before[j], drafts[j], grid[j], grid[k]) for j in range(k)]
        accepts = [accept[r] for r in rows] + [np.ones(cases, bool)]
        tokens = [token[r] for r in rows] + [fresh_token[before[k], grid[k]]]
        line = publish(
            jnp.asarray(np.stack(accepts, 1)),
            jnp.asarray(np.stack(tokens, 1)),
            jnp.asarray(np.tile(np.asarray(drafts, np.int32), (cases, 1))),
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
    whole: defaultdict[str, float] = defaultdict(float)
    for line, share in law.items():
        first = [int(t) for t in line.split()]
        for rest in itertools.product(range(3), repeat=4 - len(first)):
            tokens = first + list(rest)
            steps = zip(tokens[len(first) - 1 :], rest, strict=False)
            of_rest = np.prod([p[a, b] for a, b in steps])
            whole[" ".join(map(str, tokens))] += share * of_rest
    for line, share in data["target_four_token_distribution"].items():
        assert whole.pop(line) == pytest.approx(float(Fraction(share)), abs=1e-9)
    assert sum(whole.values()) == pytest.approx(0, abs=1e-12)


def test_chain_control_wrong_q_is_seen(golden, grid_words):
    """Control: verdicts by another row than the drafts' own change the law."""
    data = golden("chain_exact")
    p = first_order(data["target_first_order"])
    q = first_order(data["draft_first_order"])
    wrong = q.copy()
    wrong[3] = [0.4, 0.4, 0.2]
    law = line_law(p, wrong, 1, grid_words(PARTS), drafted_by=q)
    first: defaultdict[int, float] = defaultdict(float)
    for line, share in law.items():
        first[int(line.split()[0])] += share
    assert max(abs(first[x] - p[3, x]) for x in range(3)) > 1e-2
