"""Curves on disk: the same numbers back, or a measurement."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import dspark_jax
from dspark_jax.scheduling import cost_cache
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_cache import (
    Measured,
    cached_costs,
    curve_key,
    load_costs,
    save_costs,
)

MODEL = {"hidden_size": 64, "dtype": "bfloat16", "tied": True, "window": None}
MEASURED = Measured(curve([2, 4, 8], [0.1, 1 / 3, 28.000001]), 2 / 3)


@pytest.fixture
def key():
    return curve_key(MODEL, MEASURED.curve.sizes)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "curve.json"


def test_the_same_bits_come_back(path, key):
    assert load_costs(path, key) is None
    save_costs(path, key, MEASURED)
    found = load_costs(path, key)
    assert found is not None
    for name in ("sizes", "ms"):
        got, wanted = getattr(found.curve, name), getattr(MEASURED.curve, name)
        assert got.dtype == wanted.dtype and np.array_equal(got, wanted)
    # In the order of the fields' names, so that the caller's order does not matter.
    assert key == curve_key(dict(reversed(MODEL.items())), (2, 4, 8))
    assert found.draft_ms == MEASURED.draft_ms
    assert [p.name for p in path.parent.iterdir()] == ["curve.json"]


def test_measured_once(path, key):
    calls = []

    def measure():
        calls.append(1)
        return MEASURED

    for _ in range(3):
        assert cached_costs(path, key, measure).draft_ms == MEASURED.draft_ms
    assert len(calls) == 1


def test_what_the_key_holds(key):
    assert key.device_kind == jax.devices()[0].device_kind
    assert key.devices == jax.device_count()
    assert curve_key(MODEL, [2], jax.devices()[:1]).devices == 1
    assert key.jax == jax.__version__
    assert key.dspark_jax == dspark_jax.__version__


def test_every_part_of_the_key_matters(path, key):
    save_costs(path, key, MEASURED)
    others = [
        dataclasses.replace(key, device_kind="another"),
        dataclasses.replace(key, devices=key.devices + 1),
        dataclasses.replace(key, sizes=(2, 4, 9)),
        dataclasses.replace(key, sizes=(2, 4)),
        dataclasses.replace(key, jax="0.0.1"),
        dataclasses.replace(key, jaxlib="0.0.1"),
        dataclasses.replace(key, dspark_jax="0.0.0"),
        curve_key(MODEL | {"hidden_size": 65}, key.sizes),
        curve_key(MODEL | {"layers": 2}, key.sizes),
        curve_key({"hidden_size": 64}, key.sizes),
    ]
    fields = {field.name for field in dataclasses.fields(key)}
    assert fields == {*"device_kind devices model sizes jax jaxlib dspark_jax".split()}
    for other in others:
        assert load_costs(path, other) is None
    assert load_costs(path, key) is not None


def test_what_cannot_be_read_is_measured_again(path, key):
    save_costs(path, key, MEASURED)
    good = path.read_text()
    stored = json.loads(good)
    for broken in (
        "",
        good[: len(good) // 2],
        "[]",
        "null",
        "{}",
        json.dumps({"key": stored["key"]}),
        json.dumps(stored | {"ms": [1.0, 2.0]}),
        json.dumps(stored | {"ms": [1.0, 2.0, -3.0]}),
        json.dumps(stored | {"ms": [1.0, 2.0, None]}),
        json.dumps(stored | {"ms": "fast"}),
        json.dumps(stored | {"draft_ms": -1.0}),
        json.dumps(stored | {"draft_ms": None}),
        json.dumps(stored | {"ms": {"2": 1.0}}),
    ):
        path.write_text(broken)
        assert load_costs(path, key) is None
        assert cached_costs(path, key, lambda: MEASURED) is MEASURED
        assert path.read_text() == good
    path.write_bytes(b"\xff\xfe\x00")
    assert load_costs(path, key) is None
    path.unlink()
    path.mkdir()
    assert load_costs(path, key) is None


def test_a_failure_leaves_what_was_there(path, key, monkeypatch):
    save_costs(path, key, MEASURED)
    good = path.read_text()

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="disk full"):
        save_costs(path, key, Measured(curve([2, 4, 8], [1, 2, 3]), 0.0))
    assert path.read_text() == good
    assert [p.name for p in path.parent.iterdir()] == ["curve.json"]


def test_bad_input(path, key):
    with pytest.raises(ValueError, match="`sizes`.*those of the key"):
        save_costs(path, key, Measured(curve([2, 4], [1, 2]), 0.0))
    assert not path.exists()
    with pytest.raises(ValueError, match="model\\['shape'\\]"):
        curve_key({"shape": (1, 2)}, [2])
    with pytest.raises(ValueError, match="`devices`"):
        cost_cache.curve_key({}, [2], [])
