"""Temperatures and shifts of a draft on disk: both layouts, old files, whole writes."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint import native, store
from dspark_jax.checkpoint.calibrated import read_draft_config, write_temperatures
from dspark_jax.checkpoint.convert import convert, verify_stored
from dspark_jax.checkpoint.load import fit_draft, read_params
from dspark_jax.config import to_json
from dspark_jax.config_draft import draft_from_json
from dspark_jax.decoding.schedule import offered
from dspark_jax.errors import CheckpointError
from dspark_jax.models.params import flatten
from dspark_jax.scheduling.survival import sigmoid, survival
from dspark_jax.spec import Spec
from dspark_jax.testing import tiny_config, tiny_draft_config

FOUND = (0.5, 1.0, 1.25, 2.0, 3.0, 4.0)
SHIFTS = (-0.7, 0.0, 0.3, -1.5, 0.1, 1.0)


FIELDS = ("confidence_temperatures", "confidence_shifts", "calibrated_at")


def folder_bytes(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture
def drafts(data_dir, tmp_path):
    """The same draft in our layout and as a converted directory."""
    source = data_dir / "qwen3_rand/draft_rnn"
    convert(source, tmp_path / "stored", verify=False)
    _, config, params = read_params(source, tables="target")
    native.write_native(tmp_path / "native", config, params)
    return tmp_path


@pytest.mark.parametrize("layout", ["native", "stored"])
def test_only_the_config_changes(drafts, layout):
    path = drafts / layout
    before, files = read_draft_config(path), folder_bytes(path)
    made = write_temperatures(path, FOUND, 0.7, SHIFTS)
    assert made == dataclasses.replace(
        before,
        confidence_temperatures=FOUND,
        confidence_shifts=SHIFTS,
        calibrated_at=0.7,
    )
    assert read_draft_config(path) == made
    after = folder_bytes(path)
    assert list(after) == list(files)
    changed = [name for name in files if after[name] != files[name]]
    assert changed == ["config.json" if layout == "native" else store.CUSTOM_METADATA]
    # Temperatures alone take the shifts out; and back.
    made = write_temperatures(path, FOUND, 0.7)
    assert made.confidence_shifts is None and read_draft_config(path) == made
    assert write_temperatures(path, None, None) == before
    assert read_draft_config(path) == before


def test_the_loaded_draft_has_them(drafts):
    write_temperatures(drafts / "native", FOUND, 0.0, SHIFTS)
    write_temperatures(drafts / "stored", FOUND, 0.0, SHIFTS)
    config, params = native.read_native(drafts / "native")
    _, read, also = read_params(drafts / "stored", dtype="bfloat16", tables="target")
    assert config.confidence_temperatures == FOUND
    assert read.confidence_temperatures == FOUND and read.calibrated_at == 0.0
    assert config.confidence_shifts == read.confidence_shifts == SHIFTS
    assert set(flatten(params)) == set(flatten(also))
    verify_stored(drafts / "stored")
    target = tiny_config("qwen3", vocab_size=320, hidden_size=64, layers=5)
    fitted, _ = fit_draft(target, config, params)
    assert fitted.confidence_temperatures == FOUND
    assert fitted.confidence_shifts == SHIFTS


def offered_by(config, logits, **state):
    """What a policy is told of a proposal with these logits."""
    target = tiny_config("qwen3", vocab_size=320, hidden_size=64, layers=5)
    rows = np.zeros(len(logits), np.int32)
    given = {"finish": rows, "budget": rows + 99, "capacity": 99, "length": rows}
    proposal = SimpleNamespace(confidence=jnp.asarray(logits), generation=rows)
    held: Any = SimpleNamespace(**{**given, **state})
    greedy: Any = SimpleNamespace(scale=jnp.zeros(len(logits)))
    offer = offered(Spec(target, config), held, cast("Any", proposal), greedy)
    return np.asarray(offer.values)


def test_policies_get_the_survivals_of_the_loaded_draft(drafts, rng):
    whole = (2 * rng.standard_normal((3, 6))).astype(np.float32)
    close = partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-7)
    config = native.read_native_config(drafts / "native")
    close(offered_by(config, whole), survival(whole))
    write_temperatures(drafts / "native", FOUND, 0.0, SHIFTS)
    config = native.read_native_config(drafts / "native")
    # A proposal may be shorter than the draft's gamma.
    for drafted in (6, 4):
        logits = whole[:, :drafted]
        heat, shifts = np.array(FOUND[:drafted]), np.array(SHIFTS[:drafted])
        found = offered_by(config, logits)
        close(found, survival(logits, heat, shifts))
        # Controls: behind the division, with the other sign, not at all.
        late = np.cumprod(sigmoid(logits / heat + shifts), axis=1)
        for wrong in (late, survival(logits, heat, -shifts), survival(logits, heat)):
            assert np.abs(found - wrong).max() > 0.02
    # Drafts that could not be emitted are worth nothing, whatever is added.
    short = offered_by(config, logits, budget=np.full(3, 3, np.int32))
    assert (short[:, 2:] == 0).all() and np.array_equal(short[:, :2], found[:, :2])


def test_files_from_before_calibration(drafts, data_dir):
    file = drafts / "native/config.json"
    header = json.loads(file.read_text())
    for name in FIELDS:
        assert header["draft"].pop(name) is None
    file.write_text(json.dumps(header))
    config, _ = native.read_native(drafts / "native")
    assert config.confidence_temperatures is None and config.calibrated_at is None
    assert config.confidence_shifts is None
    file = drafts / "stored" / store.CUSTOM_METADATA
    data = json.loads(file.read_text())
    for name in FIELDS:
        del data["custom_metadata"]["config"][name]
    file.write_text(json.dumps(data))
    assert read_draft_config(drafts / "stored").confidence_temperatures is None
    assert write_temperatures(drafts / "stored", FOUND, 1.0).calibrated_at == 1.0


def test_files_from_before_shifts(drafts):
    write_temperatures(drafts / "native", FOUND, 0.0)
    file = drafts / "native/config.json"
    header = json.loads(file.read_text())
    assert header["draft"].pop("confidence_shifts") is None
    file.write_text(json.dumps(header))
    config = native.read_native_config(drafts / "native")
    assert config.confidence_temperatures == FOUND
    assert config.confidence_shifts is None


def test_the_shipped_draft_is_readable():
    shipped = Path(__file__).parents[2] / "checkpoints/smollm2-135m-dspark"
    assert native.read_native_config(shipped).gamma == 5


def test_json_round_trip():
    config = dataclasses.replace(
        tiny_draft_config(tiny_config("llama"), gamma=2),
        confidence_temperatures=(0.1, 1.7782794),
        confidence_shifts=(-0.3, 0.0),
        calibrated_at=1.0,
    )
    assert draft_from_json(json.loads(json.dumps(to_json(config)))) == config
    assert hash(config) != hash(dataclasses.replace(config, calibrated_at=0.5))
    assert config != dataclasses.replace(config, confidence_shifts=None)


@pytest.mark.parametrize(
    ("found", "at", "field"),
    [
        ((1.0,), 0.0, "confidence_temperatures"),
        ((1.0, 0.0), 0.0, "confidence_temperatures"),
        ((1.0, float("nan")), 0.0, "confidence_temperatures"),
        ([1.0, 1.0], 0.0, "confidence_temperatures"),
        ((1.0, True), 0.0, "confidence_temperatures"),
        ((1.0, 1.0), None, "calibrated_at"),
        (None, 0.0, "calibrated_at"),
        ((1.0, 1.0), -1.0, "calibrated_at"),
        ((1.0, 1.0), float("inf"), "calibrated_at"),
    ],
)
def test_config_is_validated(found, at, field):
    config = tiny_draft_config(tiny_config("llama"), gamma=2)
    with pytest.raises(ValueError, match=f"`{field}`"):
        dataclasses.replace(config, confidence_temperatures=found, calibrated_at=at)
    fields = {"confidence_temperatures": (1.0, 1.0), "calibrated_at": 0.0}
    dataclasses.replace(config, **fields)
    without = {"confidence": False, "confidence_with_markov": False}
    with pytest.raises(ValueError, match="without a confidence head"):
        dataclasses.replace(config, **fields, **without)
    for shifts in ((0.5,), [0.5, 0.5], (0.5, float("nan")), (0.5, False)):
        with pytest.raises(ValueError, match="`confidence_shifts`.*2 finite"):
            dataclasses.replace(config, **fields, confidence_shifts=shifts)
    with pytest.raises(ValueError, match="`confidence_shifts`.*without"):
        dataclasses.replace(config, confidence_shifts=(0.5, -0.5))
    dataclasses.replace(config, **fields, confidence_shifts=(0.5, -0.5))


@pytest.mark.parametrize("layout", ["native", "stored"])
def test_a_failed_write_changes_nothing(drafts, layout, monkeypatch):
    files = folder_bytes(drafts / layout)

    def full_disk(*args):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full_disk)
        with pytest.raises(OSError, match="no space"):
            write_temperatures(drafts / layout, FOUND, 0.0)
    assert folder_bytes(drafts / layout) == files
    with pytest.raises(ValueError, match="6 finite numbers"):
        write_temperatures(drafts / layout, FOUND[:3], 0.0)
    with pytest.raises(ValueError, match="`confidence_shifts`.*6 finite"):
        write_temperatures(drafts / layout, FOUND, 0.0, SHIFTS[:3])
    other = dataclasses.replace(read_draft_config(drafts / layout), markov_rank=8)
    rewrite = {"native": native.rewrite_native_config, "stored": store.rewrite_config}
    with pytest.raises(ValueError, match="other parameters"):
        rewrite[layout](drafts / layout, other)
    assert folder_bytes(drafts / layout) == files


def test_an_orbax_that_keeps_metadata_elsewhere_is_refused(drafts, monkeypatch):
    path = drafts / "stored"
    config = read_draft_config(path)
    new = dataclasses.replace(config, confidence_temperatures=FOUND, calibrated_at=0.0)
    files = folder_bytes(path)
    with monkeypatch.context() as patch:
        # A file of that name that Orbax does not read.
        shutil.copy(path / store.CUSTOM_METADATA, path / "other")
        patch.setattr(store, "CUSTOM_METADATA", "other")
        with pytest.raises(CheckpointError, match="convert the checkpoint"):
            store.rewrite_config(path, new)
        patch.setattr(store, "CUSTOM_METADATA", "state/manifest.ocdbt")
        with pytest.raises(CheckpointError, match="as JSON"):
            store.rewrite_config(path, new)
    (path / "other").unlink()
    assert folder_bytes(path) == files


def test_published_drafts_and_targets_are_refused(data_dir, tmp_path):
    with pytest.raises(CheckpointError, match="dspark-jax convert"):
        write_temperatures(data_dir / "qwen3_rand/draft_rnn", FOUND, 0.0)
    convert(data_dir / "llama_rand/target", tmp_path / "target", verify=False)
    with pytest.raises(CheckpointError, match="is a target"):
        write_temperatures(tmp_path / "target", FOUND, 0.0)
