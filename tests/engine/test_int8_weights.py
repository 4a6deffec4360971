"""A model in whole numbers: loaded from a folder, and drafts that change no token."""

from pathlib import Path

import jax
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.models.int8 import Int8
from dspark_jax.models.params import for_cpu

PAIR = Path(__file__).parents[1] / "data" / "qwen3_rand"
PROMPTS, NEW = ["ab", "hello there"], 16


@pytest.fixture(scope="module")
def models():
    """The same weights as floats and in whole numbers."""
    config = dspark.testing.tiny_config(layers=1, hidden_size=64)
    draft = dspark.testing.tiny_draft_config(config, gamma=2)
    built = dspark.testing.tiny_model(target=config, draft=draft, stacked=True)

    def model(whole):
        params = {name: for_cpu(tree, whole) for name, tree in built.params.items()}
        return dspark.make_model(built.spec, params, built.tokenizer)

    return model(False), model(True)


def generate(model, **options):
    settings = dict(max_new_tokens=NEW, chat=False) | options
    return [out.tokens for out in dspark.generate(model, PROMPTS, **settings)]


def test_drafts_change_no_token(models):
    floats, whole = models
    plain = generate(whole, draft_length=0)
    assert generate(whole, draft_length=2) == plain
    # Control: it is another model, by a little.
    assert [row[0] for row in generate(floats, draft_length=0)] == [
        row[0] for row in plain
    ]
    assert generate(floats, draft_length=0) != plain


@pytest.mark.slow
def test_one_request_alone_gives_the_same(models):
    """Two rows, six and twelve: other ways to multiply, the same sums."""
    _, whole = models
    together = generate(whole, draft_length=2)
    for prompt, row in zip(PROMPTS, together, strict=True):
        for length in (0, 2):
            alone = dspark.generate(
                whole, prompt, max_new_tokens=NEW, chat=False, draft_length=length
            )
            assert alone.tokens == row


def test_a_folder_is_loaded_in_whole_numbers():
    model = dspark.load(PAIR / "target", PAIR / "draft_vanilla", weights="int8")
    leaves = jax.tree.leaves(model.params, is_leaf=lambda x: isinstance(x, Int8))
    whole = [leaf for leaf in leaves if isinstance(leaf, Int8)]
    assert len(whole) > 10
    assert all(leaf.q.dtype == np.int8 for leaf in whole)
    floats = dspark.load(PAIR / "target", PAIR / "draft_vanilla")
    small, large = (sum(m.info()["bytes"].values()) for m in (model, floats))
    assert small < 0.6 * large


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="`weights` is 'int4'; allowed: 'float', "):
        dspark.load(PAIR / "target", weights="int4")
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=auto)
    with pytest.raises(ValueError, match="`weights` is 'int8' with a mesh"):
        dspark.load(PAIR / "target", weights="int8", mesh=mesh)
