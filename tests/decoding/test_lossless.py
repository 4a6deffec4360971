"""The law of what is emitted, by enumeration of every random word.

Models with laws in sixths over three tokens run through the serving code. A word
becomes a point of a row, and all that is decided on it changes at sixths of the row:
six words stand for all 2^32, and no sampling is involved.
"""

import collections
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dspark_jax as dspark
from dspark_jax.decoding import drafting, judging
from dspark_jax.models import dense
from dspark_jax.models.kv_cache import empty_cache
from dspark_jax.models.rows import dense_rows
from pallas_kernels import TOTAL, argmax_ids, draw, integer_rows, points
from pallas_kernels.verify import VerifiedRows, reference
from tests.decoding.enumeration import chain, completed, enumerate_law
from tests.decoding.scripts import with_draft_ids
from tests.models.goldens import arrays, pair
from tests.models.quick import quick_jit

# Zeros on either side, an equal row.
SIXTHS = (
    np.asarray([[1, 5, 0], [2, 2, 2], [4, 1, 1]]) / 6,
    np.asarray([[5, 1, 0], [0, 3, 3], [4, 1, 1]]) / 6,
)
COARSE = (
    np.asarray([[1, 2, 3], [3, 3, 0], [2, 2, 2]]) / 6,
    np.asarray([[3, 2, 1], [2, 1, 3], [3, 3, 0]]) / 6,
)
THIRDS = (
    np.asarray([[1, 2, 0], [1, 1, 1], [0, 1, 2]]) / 3,
    np.asarray([[2, 0, 1], [1, 1, 1], [1, 2, 0]]) / 3,
)


def logs(table):
    with np.errstate(divide="ignore"):
        return np.log(table)


def scripted(tables, n):
    return dspark.testing.scripted_model(*map(logs, tables), gamma=max(n, 1))


def distance(tables, n, rounds, parts, model=None):
    """Largest difference between the emitted law and the target's."""
    law = enumerate_law(model or scripted(tables, n), n, rounds, parts)
    assert abs(sum(law.values()) - 1) < 1e-9
    length = 1 + rounds * (n + 1)
    assert {len(tokens) for tokens in law} <= set(range(1 + rounds, length + 1))
    target = tables[0]
    return np.abs(completed(law, target, length) - chain(target, length)).max()


CASES = {
    "plain": (SIXTHS, 0, 2, 6),
    "one_draft": (SIXTHS, 1, 1, 6),
    "two_drafts": (COARSE, 2, 1, 6),
    "three_drafts": (SIXTHS, 3, 1, 6),
    "two_rounds": (COARSE, 1, 2, 6),
    "three_rounds": (THIRDS, 1, 3, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_emitted_law_is_the_targets(case):
    assert distance(*CASES[case]) < 1e-9


def test_emitted_law_at_temperature_zero():
    """Every word gives the argmax chain; lowest id on ties."""
    model = scripted(COARSE, 2)
    law = enumerate_law(model, 2, 1, 2, temperature=0.0)
    best = COARSE[0].argmax(1)
    line = [best[1]]
    for _ in range(3):
        line.append(best[line[-1]])
    for tokens in law:
        assert list(tokens) == line[: len(tokens)]


def reduced_model():
    """A draft that knows ids 2 and 0 only, in that order."""
    table = np.asarray([[3, 0, 3], [4, 0, 2], [6, 0, 0]]) / 6
    tables, ids = (COARSE[0], table), np.asarray([2, 0], np.int32)
    model = scripted(tables, 1)
    return tables, with_draft_ids(model, ids)


def test_emitted_law_with_a_reduced_draft_vocabulary():
    tables, model = reduced_model()
    assert distance(tables, 1, 1, 6, model) < 1e-9


def test_control_draft_law_on_the_wrong_ids(monkeypatch):
    real = judging.spread
    monkeypatch.setattr(judging, "spread", lambda q, d2t, v: real(q, d2t[::-1], v))
    tables, model = reduced_model()
    assert distance(tables, 1, 1, 6, model) > 1e-2


def greedy_draft(report, constant_offset=False):
    """A draft that takes the argmax and reports a row of its own choosing."""

    def choose(spec, variant, logits, requests, words, ids_of_columns):
        ids = argmax_ids(logits)
        if report == "softmax":
            scale = jnp.broadcast_to(requests.scale, ids.shape)
            weights = integer_rows(logits, scale)
            width = jnp.take_along_axis(weights, ids[:, None], 1)[:, 0]
            return ids, weights, jnp.minimum(points(words), width - 1)
        weights = jax.nn.one_hot(ids, logits.shape[1], dtype=jnp.int32) * TOTAL
        offset = points(words)
        return ids, weights, jnp.zeros_like(offset) if constant_offset else offset

    return SimpleNamespace(choose=choose)


def test_a_greedy_draft_that_says_so_is_lossless(monkeypatch):
    monkeypatch.setattr(drafting, "laws", greedy_draft("one_hot"))
    assert distance(COARSE, 1, 1, 6) < 1e-9


def test_control_softmax_row_for_a_greedy_draft(monkeypatch):
    monkeypatch.setattr(drafting, "laws", greedy_draft("softmax"))
    assert distance(COARSE, 1, 1, 6) > 1e-2


def test_control_constant_offset_of_a_greedy_draft(monkeypatch):
    monkeypatch.setattr(drafting, "laws", greedy_draft("one_hot", True))
    assert distance(COARSE, 1, 1, 6) > 1e-2


right = reference.verify_rows


def replaced_from(source):
    """Verification whose replacements are the point's token in `source(p, q)`."""

    def wrong_rows(p, q, draft_ids, offsets, is_verify, point, **options):
        real = right(p, q, draft_ids, offsets, is_verify, point, **options)
        weights = source(p, q)
        size = weights.sum(1).astype(jnp.float32)
        share = point.astype(jnp.float32) / TOTAL * size
        wrong, _ = draw(weights, share.astype(jnp.int32))
        fell = is_verify & ~real.accept
        wrong = jnp.where(fell & (wrong >= 0), wrong, real.token)
        return VerifiedRows(real.accept, wrong, real.accept_prob)

    return wrong_rows


@pytest.mark.parametrize(
    "source",
    [
        lambda p, q: p,
        lambda p, q: jnp.maximum(q - p, 0),
        lambda p, q: jnp.where(p > q, p, 0),
    ],
    ids=["target_row", "wrong_sign", "target_where_above"],
)
def test_control_wrong_replacement(source, monkeypatch):
    monkeypatch.setattr(reference, "verify_rows", replaced_from(source))
    assert distance(COARSE, 1, 1, 6) > 1e-2


def test_control_offset_of_another_step(monkeypatch):
    """Judged by its neighbour's offset, a draft falls at the wrong points."""

    def shifted(p, q, draft_ids, offsets, is_verify, point, **options):
        moved = jnp.roll(offsets, 1)
        return right(p, q, draft_ids, moved, is_verify, point, **options)

    monkeypatch.setattr(reference, "verify_rows", shifted)
    assert distance(COARSE, 2, 1, 6) > 1e-2


# Chi-square on a trained pair.
SAMPLES, TOGETHER, NEW = 4096, 256, 3


@pytest.fixture(scope="module")
def exact_law():
    """Prompt, and the law of its first three tokens' likely sequences."""
    model = pair("trained")
    prompt = arrays("qwen3_trained/trace_greedy_p0")["prompt_ids"]
    config, params = model.spec.target, model.params["target"]
    width, capacity = len(prompt) + NEW, 32

    @quick_jit
    def next_laws(lines, lengths):
        batch = lines.shape[0]
        cache = empty_cache(config, batch, capacity, jnp.dtype("float32"), False)
        rows = dense_rows(lines, lengths, jnp.zeros((batch,), jnp.int32))
        last = jnp.arange(batch, dtype=jnp.int32) * width + lengths - 1
        logits, _, _ = dense.evaluate(config, params, cache, capacity, rows, (), last)
        return jax.nn.softmax(logits)

    # Breadth first; only branches that may fill a bin are followed.
    found = {(): 1.0}
    for depth in range(NEW):
        branches = sorted(found, key=lambda t: -found[t])[:8]
        lines = np.zeros((8, width), np.int32)
        for row, tokens in zip(lines, branches, strict=False):
            row[: len(prompt) + depth] = [*prompt, *tokens]
        laws_after = np.asarray(
            next_laws(lines, np.full(8, len(prompt) + depth, np.int32)), np.float64
        )
        found = {
            (*tokens, int(t)): found[tokens] * law[t]
            for tokens, law in zip(branches, laws_after, strict=False)
            for t in np.flatnonzero(law * found[tokens] * SAMPLES > 1)
        }
    return prompt, found


def chi_square(prompt, law):
    """p-value of emitted first tokens against the law, rare ones together."""
    model = pair("trained")
    tokens = jnp.asarray(np.repeat(prompt[None], TOGETHER, 0))
    lengths = jnp.full((TOGETHER,), len(prompt), jnp.int32)
    sampling = dspark.SamplingParams(temperature=1.0)

    def generate(params, seeds):
        return dspark.generate_tokens(
            model.spec, params, tokens, lengths, seeds=seeds, max_new_tokens=NEW,
            draft_length=2, sampling=sampling,
        ).tokens  # fmt: skip

    run = quick_jit(generate)
    counts = collections.Counter()
    for call in range(SAMPLES // TOGETHER):
        seeds = np.zeros((TOGETHER, 2), np.uint32)
        seeds[:, 1] = np.arange(call * TOGETHER, (call + 1) * TOGETHER)
        for row in np.asarray(run(model.params, seeds)):
            counts[tuple(row.tolist())] += 1
    bins = [line for line, mass in law.items() if mass * SAMPLES >= 5]
    expected = [law[line] * SAMPLES for line in bins]
    seen = [counts[line] for line in bins]
    expected.append(SAMPLES - sum(expected))
    seen.append(SAMPLES - sum(seen))
    assert len(bins) >= 5 and expected[-1] >= 5
    return stats.chisquare(seen, expected).pvalue


@pytest.mark.slow
def test_first_tokens_of_the_trained_pair(exact_law):
    assert chi_square(*exact_law) > 1e-3


@pytest.mark.slow
def test_control_first_tokens_without_a_residual(exact_law, monkeypatch):
    monkeypatch.setattr(reference, "verify_rows", replaced_from(lambda p, q: p))
    assert chi_square(*exact_law) < 1e-3
