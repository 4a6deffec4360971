"""Temperature, min-p, top-p and top-k against reference files and field reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk

argmax_ids = jax.jit(pk.argmax_ids)
draw = jax.jit(pk.draw)
filtered_logits = jax.jit(pk.filtered_logits)
filtered_rows = jax.jit(pk.filtered_rows)
integer_rows = jax.jit(pk.integer_rows)
verify_rows = jax.jit(pk.verify_rows)

OFF = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)


def settings(rows: int, **given):
    values = OFF | given
    values["scale"] = pk.scale_of(np.asarray(values.pop("temperature")))
    dtypes = dict(scale="f4", top_p="f4", top_k="i4", min_p="f4")
    return {
        name: jnp.asarray(np.broadcast_to(np.asarray(values[name], dtype), (rows,)))
        for name, dtype in dtypes.items()
    }


def filtered(logits, **given) -> np.ndarray:
    """The filtered rows as shares, float64."""
    logits = jnp.atleast_2d(jnp.asarray(np.asarray(logits, np.float32)))
    rows = filtered_rows(logits, **settings(logits.shape[0], **given))
    return np.asarray(rows) / pk.TOTAL


def whole(row) -> jax.Array:
    """Shares as an integer row again."""
    return jnp.asarray(np.rint(np.asarray(row) * pk.TOTAL), jnp.int32)


def oracle(logits, temperature, top_p, top_k, min_p) -> np.ndarray:
    """One row in float64, by sorting."""
    scaled = np.asarray(logits, np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.lexsort((np.arange(len(p)), -scaled))
    before = np.cumsum(p[order]) - p[order]
    # A float64 sum may pass 1 by rounding.
    keep = ((before <= top_p) | (top_p >= 1)) & (p[order] >= min_p * p.max())
    if top_k > 0:
        keep &= np.arange(len(p)) < top_k
    result = np.zeros_like(p)
    result[order[keep]] = p[order[keep]]
    return result / result.sum()


def numbers(values):
    return [float(v) for v in values]


def test_transforms_golden(golden):
    cases = golden("transforms")["cases"]
    # One width for all, so that one program serves: excluded logits behind the end.
    width = max(len(case["logits"]) for case in cases)
    logits = np.full((len(cases), width), -np.inf)
    for row, case in zip(logits, cases, strict=True):
        row[: len(case["logits"])] = numbers(case["logits"])
    names = ("temperature", "top_p", "top_k")
    probs = filtered(logits, **{name: [c[name] for c in cases] for name in names})
    for row, case in zip(probs, cases, strict=True):
        assert list(np.flatnonzero(row)) == case["kept"], case["name"]
        expected = np.pad(case["probs"], (0, width - len(case["probs"])))
        np.testing.assert_allclose(row, expected, atol=1e-6, err_msg=case["name"])
    assert len(cases) == 24


def test_transforms_golden_refuses_top_k_first(golden):
    """Control: the reverse order of top-p and top-k fails on a golden case."""
    by_name = {case["name"]: case for case in golden("transforms")["cases"]}
    case = by_name["order_matters_top_p_first"]
    first = filtered(case["logits"], top_k=case["top_k"])
    with np.errstate(divide="ignore"):
        reverse = filtered(np.log(first[0]), top_p=case["top_p"])[0]
    assert list(np.flatnonzero(reverse)) != case["kept"]


def test_min_p_golden(golden):
    cases = golden("extensions_minp_penalties")["cases"]
    for case in cases:
        # The penalties are refused by name elsewhere: their result is the input here.
        probs = filtered(
            case["penalised_logits"],
            temperature=case["temperature"],
            min_p=case["min_p"],
        )[0]
        np.testing.assert_allclose(probs, case["probs"], atol=1e-6)
    assert len(cases) == 5


def test_sampling_golden_rows(data_dir):
    data = np.load(data_dir / "sampling.npz")
    for side in ("target", "draft"):
        logits = jnp.asarray(data[f"{side}_logits"])
        scale = jnp.asarray(pk.scale_of(data["temperature"]))
        probs = np.asarray(integer_rows(logits, scale)) / pk.TOTAL
        np.testing.assert_allclose(probs, data[f"{side}_probs"], atol=1e-6)
        np.testing.assert_array_equal(probs[np.isneginf(logits)], 0)
        np.testing.assert_array_equal(argmax_ids(logits), data[f"argmax_{side}"])


def random_case(rng, width):
    # Quantised, so that ties abound, some at the ends of the prefixes.
    logits = np.round(rng.normal(size=width) * 2 * 4) / 4
    return logits, dict(
        temperature=rng.uniform(0.3, 2),
        top_p=rng.choice([1.0, rng.uniform(0.05, 0.999)]),
        top_k=int(rng.choice([0, -1, rng.integers(1, width + 5)])),
        min_p=rng.choice([0.0, rng.uniform(0, 0.5)]),
    )


@pytest.mark.parametrize("width", [5, 50, 700])
def test_random_rows_equal_a_sort(width, rng):
    rows = [random_case(rng, width) for _ in range(300)]
    logits = np.stack([row[0] for row in rows])
    given = {name: [row[1][name] for row in rows] for name in OFF}
    probs = filtered(logits, **given)
    expected = np.stack([oracle(row, **case) for row, case in rows])
    assert not (probs > 0)[expected == 0].any()
    # Less than two units may be cut to nothing.
    assert (probs > 0)[expected * pk.TOTAL >= 2].all()
    np.testing.assert_allclose(probs, expected, atol=1e-6)


def test_filters_off_equal_plain_rows(rng):
    logits = jnp.asarray(rng.normal(size=(6, 999)) * 5, jnp.float32)
    for temperature in (1.0, 0.3, 0.0):
        given = settings(6, temperature=temperature, top_k=999)
        plain = integer_rows(logits, given["scale"])
        np.testing.assert_array_equal(filtered_rows(logits, **given), plain)
        # Tokens of weight zero stay as well: noise can lift them.
        np.testing.assert_array_equal(filtered_logits(logits, **given), logits)


def test_bfloat16_is_filtered_by_its_own_values(rng):
    logits = jnp.asarray(rng.normal(size=(6, 999)) * 3, jnp.bfloat16)
    given = settings(
        6, top_p=0.8, top_k=[3, 50, 0, 0, 7, 1], min_p=[0, 0, 0, 0.1, 0, 0]
    )
    cut = filtered_logits(logits, **given)
    assert cut.dtype == jnp.bfloat16
    wide = filtered_logits(logits.astype(jnp.float32), **given)
    np.testing.assert_array_equal(cut.astype(jnp.float32), wide)
    assert 1 < np.isfinite(wide).sum() < wide.size


def test_temperature_zero_is_the_lowest_argmax_whatever_the_filters(rng):
    logits = np.round(rng.normal(size=(50, 20)))
    for temperature in (0.0, 9e-6):
        probs = filtered(logits, temperature=temperature, top_p=0.3, top_k=3, min_p=0.1)
        np.testing.assert_array_equal(probs, np.eye(20)[logits.argmax(1)])


def test_temperature_at_the_limit_is_a_softmax():
    rows = integer_rows(jnp.zeros((1, 4)), jnp.asarray(pk.scale_of(np.asarray([1e-5]))))
    np.testing.assert_array_equal(rows, np.full((1, 4), pk.TOTAL // 4))


def test_mass_equal_to_top_p_keeps_the_next_token():
    assert (filtered(np.zeros(4), top_p=0.5) > 0).sum() == 3
    assert (filtered(np.zeros(4), top_p=0.4999) > 0).sum() == 2


def test_a_token_right_at_min_p_stays(rng):
    """And one that is a millionth below it goes."""
    octaves = -rng.integers(1, 4 << 20, 3000) / 2**20
    share = 2.0**octaves
    near = share.astype(np.float32)
    down = np.where(near > share, np.nextafter(near, np.float32(0)), near)
    logits = jnp.asarray(np.stack([0 * octaves, octaves], 1), jnp.float32)
    # Logits in octaves, so that the ratio of the two tokens is exact.
    given = settings(3000) | dict(scale=jnp.full(3000, 2.0**20, jnp.float32))
    for limit, stays in ((down, True), (share + 1e-6, False)):
        given["min_p"] = jnp.asarray(limit, jnp.float32)
        kept = np.asarray(filtered_rows(logits, **given))[:, 1] > 0
        np.testing.assert_array_equal(kept, stays)


def test_signed_zeros_are_one_tie():
    for zeros in ([-0.0, -0.0, 0.0], [-0.0, 0.0, -0.0], [0.0, -0.0, 0.0]):
        probs = filtered([*zeros, -1.0], top_k=2)
        np.testing.assert_array_equal(probs, [[0.5, 0.5, 0, 0]])


def test_fr04_top_p_is_measured_on_the_whole_row(rng):
    row = np.asarray([0.35, 0.25, 0.20, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03])
    probs = filtered(np.log(row), top_k=4, top_p=0.82)[0]
    assert list(np.flatnonzero(probs)) == [0, 1, 2, 3]

    # Whatever the plain sampler can emit, the verifier can accept or emit, and the
    # other way round: both are given the same row.
    width, count = 9, 1000
    logits = rng.normal(size=(count, width)).astype(np.float32)
    given = settings(count, top_k=4, top_p=0.82)
    p = filtered_rows(jnp.asarray(logits), **given)
    points = jnp.asarray(rng.integers(0, pk.TOTAL, count), jnp.int32)
    sampled = np.asarray(draw(p, points)[0])
    assert np.all(np.asarray(p)[np.arange(count), sampled] > 0)
    one_hot = jnp.eye(width, dtype=jnp.int32) * pk.TOTAL
    for token in range(width):
        rows = verify_rows(
            p,
            jnp.broadcast_to(one_hot[token], p.shape),
            jnp.full(count, token, jnp.int32),
            jnp.zeros(count, jnp.int32),
            jnp.ones(count, bool),
            jnp.zeros(count, jnp.int32),
        )
        np.testing.assert_array_equal(rows.accept, np.asarray(p)[:, token] > 0)


def test_fr05_ties_at_the_boundary():
    with np.errstate(divide="ignore"):
        logits = np.log(np.asarray([0.4, 0.3, 0.3, 0.0]))
    probs = filtered(logits, top_k=2)
    np.testing.assert_allclose(probs, [[4 / 7, 3 / 7, 0, 0]], atol=1e-6)
    assert list(np.flatnonzero(probs[0])) == [0, 1]
    rows = verify_rows(
        whole(probs),
        whole([[0, 0, 1.0, 0]]),
        jnp.asarray([2], jnp.int32),
        jnp.asarray([5], jnp.int32),
        jnp.asarray([True]),
        jnp.zeros(1, jnp.int32),
    )
    assert not rows.accept[0] and rows.token[0] == 0


def test_fr06_never_an_empty_row(rng):
    logits = rng.normal(size=(200, 40))
    for given in (
        dict(top_k=1, top_p=0.8, temperature=0.01),
        dict(top_k=2, top_p=1e-6),
        dict(top_p=0.0),
        dict(min_p=1.0),
    ):
        probs = filtered(logits, **given)
        np.testing.assert_array_equal(probs, np.eye(40)[logits.argmax(1)])


def test_fr07_filtered_drafts_are_accepted_more_often(rng, random_words):
    stats = pytest.importorskip("scipy.stats")
    width, count = 50, 20_000
    target = jnp.asarray(rng.normal(size=(1, width)) * 2, jnp.float32)
    # The same two leaders, the mass spread over everything.
    broad = 0.3 * target + jnp.asarray(rng.normal(size=(1, width)), jnp.float32) * 0.05
    given = settings(1, top_k=2)
    p = filtered_rows(target, **given)
    accepted = []
    for q in (filtered_rows(broad, **given), integer_rows(broad, given["scale"])):
        words = random_words(7, 2, count)
        q = jnp.broadcast_to(q, (count, width))
        drafts, offsets = draw(q, pk.points(words[0]))
        rows = verify_rows(
            jnp.broadcast_to(p, (count, width)),
            q,
            drafts,
            offsets,
            jnp.ones(count, bool),
            pk.points(words[1]),
        )
        accepted.append(np.asarray(rows.accept).mean())
        kept = np.flatnonzero(np.asarray(p[0]))
        seen = np.bincount(np.asarray(rows.token), minlength=width)
        assert seen.sum() == seen[kept].sum()
        expected = np.asarray(p[0], np.float64)[kept]
        expected *= count / expected.sum()
        assert stats.chisquare(seen[kept], expected).pvalue > 1e-3
    assert accepted[0] > accepted[1] + 0.1


@pytest.mark.parametrize("value", [-5.0, np.finfo(np.float32).min])
def test_fr35_flat_rows_of_odd_width(value):
    logits = jnp.full((3, 100), value, jnp.float32)
    np.testing.assert_array_equal(argmax_ids(logits), 0)
    probs = filtered(logits)
    # The first token takes the 24 units that a hundred equal shares leave.
    np.testing.assert_allclose(probs, 0.01, rtol=1e-5)
    assert list(np.flatnonzero(filtered(logits, top_k=7)[0])) == list(range(7))
    point = jnp.asarray([0, int(0.505 * pk.TOTAL), pk.TOTAL - 1], jnp.int32)
    np.testing.assert_array_equal(draw(whole(probs), point)[0], [0, 50, 99])


def test_fr35_unusable_rows_give_minus_one():
    finite = np.zeros(100, np.float32)
    rows = np.stack([finite - np.inf, finite, finite, finite])
    # The sign of NaN puts it below all other bits: top-k would cut it first.
    rows[1, 3], rows[2, 4] = -np.float32(np.nan), np.inf
    logits = jnp.asarray(rows)
    np.testing.assert_array_equal(argmax_ids(logits), [-1, -1, -1, 0])
    every = dict(top_k=2, top_p=0.5, min_p=0.1)
    for given in ({}, dict(temperature=0.0), dict(top_k=2), every):
        probs = filtered(logits, **given)
        np.testing.assert_array_equal(probs[:3], 0)
        assert probs[3].sum() == 1
        token, _ = draw(whole(probs), jnp.zeros(4, jnp.int32))
        np.testing.assert_array_equal(token, [-1, -1, -1, 0])


def test_rows_do_not_depend_on_other_rows(rng):
    logits = rng.normal(size=(13, 1003)).astype(np.float32) * 3
    rows = settings(13, temperature=0.8, top_p=rng.uniform(0.1, 1, 13), top_k=400)
    order = rng.permutation(13)
    for f in (
        lambda x, s: filtered_rows(x, **s),
        lambda x, s: integer_rows(x, s["scale"]),
    ):
        whole = np.asarray(f(logits, rows))
        picks = [order, *(np.arange(n) for n in (1, 2, 6))]
        for pick in picks:
            part = jax.tree.map(lambda x, pick=pick: x[pick], rows)
            np.testing.assert_array_equal(f(logits[pick], part), whole[pick])


def test_strong_types_of_results():
    given = settings(2)
    assert filtered_rows(jnp.zeros((2, 3)), **given).dtype == jnp.int32
    assert argmax_ids(jnp.zeros((2, 3))).dtype == jnp.int32
    half = integer_rows(jnp.zeros((2, 3), jnp.bfloat16), given["scale"])
    assert half.dtype == jnp.int32
