"""Training that goes on from a draft, on another text."""

import dataclasses

import numpy as np
import pytest

from dspark_jax.checkpoint.draft import read_draft
from dspark_jax.errors import CheckpointError
from dspark_jax.models.params import flatten
from dspark_jax.training.export import export_draft
from dspark_jax.training.trainer import Cadence, Trainer
from tests.training.conftest import RECIPE, target_of, text_of

QUIET = Cadence(log=2, measure=0, save=2)
SHAPE = dataclasses.replace(RECIPE.draft, vocab_size=128)
FIRST = dataclasses.replace(RECIPE, draft=SHAPE)
# Of another shape: the base's counts.
SECOND = dataclasses.replace(RECIPE, steps=4, ce_steps=0, ce_start=0.1)


def make(target, text, config, run, **options):
    return Trainer(*target, text, config, run, held_out=4, **options)


@pytest.fixture(scope="module")
def first(target, text, tmp_path_factory):
    trainer = make(target, text, FIRST, tmp_path_factory.mktemp("first"))
    assert trainer.train(cadence=QUIET)
    return trainer


@pytest.fixture(scope="module")
def draft(first, tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    calibrated = dataclasses.replace(
        first.draft,
        confidence_temperatures=(1.0, 1.1, 1.2),
        calibrated_at=0.0,
        confidence_shifts=(0.1, 0.0, -0.1),
    )
    export_draft(folder, calibrated, first.state.exported, first.frozen)
    return read_draft(folder)


@pytest.fixture(scope="module")
def second(target, draft, tmp_path_factory):
    return make(
        target, text_of(14, seed=1), SECOND, tmp_path_factory.mktemp("second"),
        base=draft,
    )  # fmt: skip


def test_the_weights_are_the_drafts(first, second):
    assert second.draft == first.draft
    assert second.draft.confidence_temperatures is None
    assert second.draft.confidence_shifts is None
    have, want = flatten(second.state.params), flatten(first.state.exported)
    assert have.keys() == want.keys()
    for path, leaf in want.items():
        if path == ("fc", "weight"):
            continue
        np.testing.assert_array_equal(have[path], leaf, err_msg=str(path))
    # The second text has other features, so that they are divided by something else.
    scales = [np.asarray(t.frozen["scale"])[None] for t in (first, second)]
    assert (scales[0] != scales[1]).any()
    fc = ("fc", "weight")
    np.testing.assert_allclose(have[fc] / scales[1], want[fc] / scales[0], rtol=1e-5)


def test_the_vocabulary_is_the_drafts(target, first, second, tmp_path):
    np.testing.assert_array_equal(second.frozen["d2t"], first.frozen["d2t"])
    np.testing.assert_array_equal(second.frozen["t2d"], first.frozen["t2d"])
    np.testing.assert_array_equal(second.corpus.t2d, first.corpus.t2d)
    # A new draft for that text would have had another one.
    fresh = make(target, text_of(14, seed=1), FIRST, tmp_path)
    assert (np.asarray(fresh.frozen["d2t"]) != np.asarray(first.frozen["d2t"])).any()


def test_a_run_goes_on_with_its_base_only(target, draft, second):
    run, text = second.files.folder, text_of(14, seed=1)
    second.train(cadence=QUIET, most=2)
    again = make(target, text, SECOND, run, base=draft)
    assert again.step == 2
    assert again.train(cadence=QUIET)
    with pytest.raises(ValueError, match="base"):
        make(target, text, SECOND, run)
    config, params = draft
    other = {**params, "norm": {"weight": params["norm"]["weight"] + 1}}
    with pytest.raises(ValueError, match="base"):
        make(target, text, SECOND, run, base=(config, other))


def test_drafts_that_do_not_fit(target, draft, text, tmp_path):
    config, params = draft
    deeper = target_of(layers=5)
    with pytest.raises(CheckpointError, match="target layers"):
        make(deeper, text, SECOND, tmp_path, base=draft)
    own = dataclasses.replace(config, own_head=True)
    with pytest.raises(ValueError, match="own_head"):
        make(target, text, SECOND, tmp_path, base=(own, params))
