"""The store of target features, and which sequences a step sees."""

import json

import numpy as np
import pytest

from dspark_jax.training.batches import (
    draft_vocabulary,
    step_anchors,
    step_sequences,
    usable,
)
from dspark_jax.training.bigram import bigrams
from dspark_jax.training.features import FeatureStore

FIELDS = {"features": (3, "bfloat16"), "top_ids": (2, "uint16")}
BYTES = 5 * (3 * 2 + 2 * 2)  # of a sequence


def tokens_of(count, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(0, 9, (count, 5)).astype(np.int32)


def rows_of(sequences):
    """Values that name their sequence."""
    at = np.asarray(sequences)[:, None, None]
    return {
        "features": (at + np.zeros((1, 5, 3))).astype("bfloat16"),
        "top_ids": (at + np.zeros((1, 5, 2))).astype(np.uint16),
    }


def test_rows_are_kept_over_opening_and_growing(tmp_path):
    tokens = tokens_of(6)
    store = FeatureStore(tmp_path, {"target": 1}, tokens, FIELDS)
    some = np.array([4, 1])
    assert store.missing(some).tolist() == [4, 1] and not store.has(some)
    store.write(some, rows_of(some))
    more = np.concatenate([tokens, tokens_of(3, seed=1)])
    again = FeatureStore(tmp_path, {"target": 1}, more, FIELDS)
    assert len(again) == 2 and again.has(some)
    found = again.read(np.array([1, 4]))
    assert found["top_ids"][:, 0, 0].tolist() == [1, 4]
    assert found["features"].astype(np.float32)[:, 4, 2].tolist() == [1.0, 4.0]
    last = np.array([8])
    again.write(last, rows_of(last))
    assert again.has(last)


def test_other_text_in_a_place_is_not_taken_for_the_old_one(tmp_path):
    tokens = tokens_of(4)
    store = FeatureStore(tmp_path, {}, tokens, FIELDS)
    every = np.arange(4)
    store.write(every, rows_of(every))
    tokens = tokens.copy()
    tokens[2, 3] += 1
    assert FeatureStore(tmp_path, {}, tokens, FIELDS).missing(every).tolist() == [2]


def test_size_is_bounded(tmp_path):
    tokens = tokens_of(6)
    store = FeatureStore(tmp_path, {}, tokens, FIELDS, limit=2 * BYTES + 1)
    every = np.arange(6)
    store.write(every, rows_of(every))
    assert store.rows == 2 and len(store) == 2
    assert store.missing(every).tolist() == []
    assert not store.has(np.array([1, 2]))
    size = sum(p.stat().st_size for p in tmp_path.glob("*.bin"))
    assert size == 2 * BYTES + 2 * 4


def test_rows_of_another_target_are_refused(tmp_path):
    FeatureStore(tmp_path, {"target": 1, "taps": [1]}, tokens_of(2), FIELDS)
    with pytest.raises(ValueError, match="taps"):
        FeatureStore(tmp_path, {"target": 1, "taps": [2]}, tokens_of(2), FIELDS)
    with pytest.raises(ValueError, match="fields"):
        other = {**FIELDS, "top_ids": (4, "uint16")}
        FeatureStore(tmp_path, {"target": 1, "taps": [1]}, tokens_of(2), other)
    assert json.loads((tmp_path / "store.json").read_text())["target"] == 1


def test_every_pass_sees_every_sequence_once():
    count, batch = 7, 3
    seen = np.concatenate([step_sequences(5, s, batch, count) for s in range(14)])
    passes = seen[: 6 * count].reshape(6, count)
    assert (np.sort(passes, axis=1) == np.arange(count)).all()
    # Not the same order twice, nor with another seed.
    assert len({tuple(p) for p in passes.tolist()}) == 6
    assert step_sequences(6, 0, batch, count).tolist() != seen[:3].tolist()
    # A function of the step alone.
    np.testing.assert_array_equal(step_sequences(5, 9, batch, count), seen[27:30])


def test_anchors_differ_between_steps():
    mask = np.ones((2, 30), bool)
    first, keep = step_anchors(1, 0, mask, 4)
    assert keep.all() and (np.diff(first) > 0).all()
    np.testing.assert_array_equal(first, step_anchors(1, 0, mask, 4)[0])
    assert (first != step_anchors(1, 1, mask, 4)[0]).any()
    assert (first != step_anchors(2, 0, mask, 4)[0]).any()


def test_vocabulary_and_bigrams():
    tokens = np.array([[5, 3, 3, 8, 5, 3]])
    d2t = draft_vocabulary(tokens, 2, 10)
    assert d2t.dtype == np.int32 and d2t.tolist() == [3, 5]
    # Ties go to the lowest ids, so that the choice is one.
    assert draft_vocabulary(tokens, 4, 10).tolist() == [0, 3, 5, 8]
    t2d = np.full(10, -1, np.int32)
    t2d[d2t] = [0, 1]
    written = np.array([[False, True, True, True, False, True]])
    pairs = bigrams(tokens, written, t2d)
    # 3 -> 8 ends outside the vocabulary, 8 -> 5 in a token that was given.
    assert pairs.tolist() == [[5, 0], [3, 0], [5, 0]]
    assert usable(np.array([[1] * 14 + [0], [1] * 13 + [0, 0]])).tolist() == [0]
