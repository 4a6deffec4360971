"""Runs: resumed as if never interrupted, refused when they are another run."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from dspark_jax.checkpoint.native import read_native
from dspark_jax.models.draft import backbone
from dspark_jax.models.params import check_tree, flatten
from dspark_jax.training.curves import draw
from dspark_jax.training.export import export_draft
from dspark_jax.training.held_out import held_out_figures
from dspark_jax.training.run_files import RunFiles
from dspark_jax.training.trainer import Cadence, Trainer
from tests.training.conftest import EXACT, RECIPE, target_of, text_of

QUIET = Cadence(log=2, measure=0, save=2)


def make(target, text, config, run, **options):
    return Trainer(*target, text, config, run, held_out=4, **options)


def leaves_of(trainer):
    return [np.asarray(x) for x in jax.tree.leaves(trainer.state)]


def interrupted(target, text, config, run, at, **options):
    """A run that is stopped after `at` steps, lost, and taken up again."""
    first = make(target, text, config, run, **options)
    first.train(cadence=dataclasses.replace(QUIET, save=at), most=at)
    return make(target, text, config, run, **options)


@pytest.fixture(scope="module")
def whole(target, text, tmp_path_factory):
    """A recipe's run without interruption."""
    trainer = make(target, text, RECIPE, tmp_path_factory.mktemp("whole"))
    assert trainer.train(cadence=QUIET)
    return trainer


def test_a_resumed_run_equals_an_uninterrupted_one(target, text, whole, tmp_path):
    resumed = interrupted(target, text, RECIPE, tmp_path, 3)
    assert resumed.step == 3
    assert resumed.train(cadence=QUIET)
    for have, want in zip(leaves_of(resumed), leaves_of(whole), strict=True):
        assert (have == want).all()


def test_a_run_learns_and_says_so(whole):
    lines = list(whole.files.metrics())
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert lines[-1]["loss"] < lines[0]["loss"]
    rates = [line["rate"] for line in lines]
    assert rates == pytest.approx([1e-2, 1e-2, 0.5e-2])
    assert [line["ce_weight"] for line in lines] == pytest.approx([0.775, 0.325, 0.1])


def test_metrics_of_lost_steps_are_dropped(target, text, tmp_path):
    files = RunFiles(tmp_path)
    for step in (2, 4, 6):
        files.append({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    files.forget_after(4)
    assert [line["step"] for line in files.metrics()] == [2, 4]


def test_features_from_the_store_and_anew_are_the_same(target, text, whole, tmp_path):
    anew = make(target, text, RECIPE, tmp_path, cache_bytes=0)
    anew.train(cadence=QUIET)
    assert not (tmp_path / "features").exists()
    for have, want in zip(leaves_of(anew), leaves_of(whole), strict=True):
        assert (have == want).all()


def test_another_run_in_the_folder_is_refused(target, text, whole):
    run = whole.files.folder
    for config, name in (
        (dataclasses.replace(RECIPE, seed=4), "seed"),
        (dataclasses.replace(RECIPE, rate=1e-3), "rate"),
    ):
        with pytest.raises(ValueError, match=name):
            make(target, text, config, run)
    with pytest.raises(ValueError, match="text"):
        make(target, text_of(14, seed=1), RECIPE, run)
    longer = dataclasses.replace(RECIPE, steps=8)
    assert make(target, text, longer, run).step == 6
    # As it was, for the other tests.
    make(target, text, RECIPE, run)


def test_an_exported_draft_is_read_as_it_was_trained(whole, tmp_path):
    export_draft(tmp_path / "draft", whole.draft, whole.state.exported, whole.frozen)
    config, params = read_native(tmp_path / "draft")
    assert config == whole.draft
    check_tree(params, backbone.abstract_draft_params(config), "draft")
    have, trained = flatten(params), flatten(whole.state.exported)
    np.testing.assert_array_equal(have[("d2t",)], whole.frozen["d2t"])
    # `fc` takes the features as they are; training divides them first.
    features = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    scale = np.asarray(whole.frozen["scale"])
    want = (features / scale) @ np.asarray(trained[("fc", "weight")]).T
    np.testing.assert_allclose(
        features @ np.asarray(have[("fc", "weight")]).T, want, rtol=1e-4, atol=1e-4
    )
    assert np.abs(scale - 1).max() > 0.1
    # What is exported is the average, not the last weights.
    last = flatten(whole.state.params)[("norm", "weight")]
    average = trained[("norm", "weight")]
    assert (np.asarray(have[("norm", "weight")]) == np.asarray(average)).all()
    assert (np.asarray(last) != np.asarray(average)).any()


def test_what_is_measured_is_what_is_exported(whole, monkeypatch):
    monkeypatch.setattr(whole.files, "append", lambda line: None)

    def figures(params):
        return held_out_figures(
            whole.draft, whole.config, params, whole.frozen, whole.corpus
        ).to_json()

    measured = whole.measure()["held_out"]
    assert measured == figures(whole.state.exported)
    assert measured["acceptance"] != figures(whole.state.params)["acceptance"]


def test_settings_that_do_not_fit(target, text, tmp_path):
    def refused(match, text=text, **changes):
        config = dataclasses.replace(RECIPE, **changes)
        with pytest.raises(ValueError, match=match):
            make(target, text, config, tmp_path / match[:5])

    refused("held out", text=text_of(4))
    high = text_of(14)
    refused("token id", text=dataclasses.replace(high, tokens=high.tokens + 200))
    shape = dataclasses.replace(RECIPE.draft, layers=3)
    refused("`start` is 'target'", draft=shape)
    with pytest.raises(ValueError, match="`num_kv_heads` is 3"):
        make(
            target,
            text,
            dataclasses.replace(
                RECIPE, draft=dataclasses.replace(RECIPE.draft, num_kv_heads=3)
            ),
            tmp_path / "heads",
        )


def test_curves_without_matplotlib_or_steps(whole, tmp_path):
    lines = list(whole.files.metrics())
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match="matplotlib"):
            draw(lines, tmp_path / "curves.png")
        return
    with pytest.raises(ValueError, match="no metrics"):
        draw([], tmp_path / "curves.png")
    draw(lines, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_settings_are_stored(whole):
    found = json.loads((whole.files.folder / "settings.json").read_text())
    assert found["config"]["draft"]["taps"] == [-1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("config", [RECIPE, EXACT], ids=["recipe", "exact"])
def test_a_mesh_trains_the_same_draft(target, text, config, tmp_path):
    one = dataclasses.replace(config, sequences=4, dtype="float32")
    alone = make(target, text, one, tmp_path / "alone")
    alone.train(cadence=QUIET)
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
    spread = make(target, text, one, tmp_path / "mesh", mesh=mesh)
    spread.train(cadence=QUIET)
    gate = flatten(spread.state.params)[("layers", "full", "gate_proj", "weight")]
    assert "tensor" in str(gate.sharding.spec)
    for have, want in zip(leaves_of(spread), leaves_of(alone), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-3, atol=2e-5)
    resumed = make(target, text, one, tmp_path / "mesh", mesh=mesh)
    for have, want in zip(leaves_of(resumed), leaves_of(spread), strict=True):
        assert (have == want).all()
    with pytest.raises(ValueError, match="`sequences` is 2"):
        make(target, text, config, tmp_path / "odd", mesh=mesh)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["none", "vanilla", "gated", "rnn"])
def test_every_head_learns_the_text(target, head, tmp_path):
    """One repeated sequence: after enough steps the draft knows what follows."""
    rank = 0 if head == "none" else 8
    shape = dataclasses.replace(EXACT.draft, markov_head=head, markov_rank=rank)
    config = dataclasses.replace(
        EXACT, draft=shape, steps=150, cooldown=50, ce_steps=0, ce_start=0.1
    )
    one = text_of(1)
    text = dataclasses.replace(
        one,
        **{
            name: np.repeat(getattr(one, name), 8, axis=0)
            for name in ("tokens", "role", "temperature")
        },
    )
    trainer = make(target, text, config, tmp_path)
    trainer.train(cadence=Cadence(log=50, measure=0, save=0))
    lines = list(trainer.files.metrics())
    assert lines[-1]["ce"] < 0.5 * lines[0]["ce"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma4"])
def test_every_kind_of_target_can_be_trained_for(text, architecture, tmp_path):
    config = dataclasses.replace(EXACT, steps=30, cooldown=10, warmup=1)
    start = "random" if architecture == "gemma4" else "target"
    config = dataclasses.replace(config, start=start)
    trainer = make(target_of(architecture), text, config, tmp_path)
    assert trainer.draft.backbone.architecture == (
        "gemma4" if architecture == "gemma4" else "qwen3"
    )
    trainer.train(cadence=Cadence(log=10, measure=0, save=0))
    losses = [line["loss"] for line in trainer.files.metrics()]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    export_draft(tmp_path / "d", trainer.draft, trainer.state.exported, trainer.frozen)
    assert read_native(tmp_path / "d")[0] == trainer.draft
