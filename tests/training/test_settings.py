"""Settings of training: files, defaults, refusals."""

from pathlib import Path

import pytest

from dspark_jax.training.settings import (
    DraftShape,
    TrainConfig,
    config_from_json,
    read_recipe,
)

RECIPES = Path(__file__).parents[2] / "recipes"


def test_settings_survive_json():
    config = TrainConfig(draft=DraftShape(taps=(1, 2)), steps=7, top=3)
    assert config_from_json(config.to_json()) == config
    assert config_from_json({}) == TrainConfig()


@pytest.mark.parametrize(
    "path", sorted(RECIPES.glob("*/recipe.toml")), ids=lambda p: p.parent.name
)
def test_recipes_are_read(path):
    assert read_recipe(path).steps > 0


def test_the_default_is_the_papers():
    config = TrainConfig()
    assert (config.loss.ce, config.loss.l1, config.loss.confidence) == (0.1, 0.9, 1.0)
    assert config.loss.decay == 4.0 and config.rate == 6e-4 and config.clip == 1.0
    assert config.warmup / config.steps == pytest.approx(0.04)
    shape = config.draft
    assert (shape.layers, shape.block_size, shape.markov_rank) == (5, 7, 256)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("stepz = 3", "stepz"),
        ("steps = 0", "`steps` is 0"),
        ("rate = -1.0", "`rate` is -1.0"),
        ('start = "warm"', "`start` is 'warm'"),
        ("average = 1.0", "`average` is 1.0"),
        ("[draft]\nlayerz = 3", "layerz"),
        ("bigram_steps = 3\n[draft]\nmarkov_head = 'rnn'", "`bigram_steps` is 3"),
        ("steps = ", "recipe.toml"),
    ],
)
def test_recipes_that_are_wrong(tmp_path, text, match):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        read_recipe(path)
    with pytest.raises(ValueError, match="cannot read"):
        read_recipe(tmp_path / "nothing.toml")
