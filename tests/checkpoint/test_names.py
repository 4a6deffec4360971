"""Tensor names against the config: prefixes, ties, and what is reported."""

import numpy as np
import pytest

from dspark_jax.checkpoint.source import open_source
from dspark_jax.errors import CheckpointError


def renamed(tensors, old, new):
    return {name.replace(old, new, 1): value for name, value in tensors.items()}


@pytest.mark.parametrize(
    "prefix", ["", "model.", "model.language_model.", "language_model.model."]
)
@pytest.mark.parametrize("name", ["qwen3_rand/target", "qwen3_rand/draft_rnn"])
def test_fr41_prefixes(folder, tmp_path, name, prefix):
    plain = folder(name)
    want = open_source(plain.write(tmp_path / "plain"))
    other = plain.copy()
    old = "model." if name.endswith("target") else ""
    other.tensors = {
        (key if key.startswith("lm_head") else prefix + key.removeprefix(old)): value
        for key, value in plain.tensors.items()
    }
    if prefix == "language_model.model.":
        head = other.tensors.pop("lm_head.weight")
        other.tensors["language_model.lm_head.weight"] = head
    got = open_source(other.write(tmp_path / "other"))
    assert got.config == want.config
    for path in want.shapes:
        np.testing.assert_array_equal(got.read_leaf(path), want.read_leaf(path))


def test_fr41_unmatched_prefix_is_explained(folder, tmp_path):
    broken = folder("qwen3_rand/target")
    broken.tensors = renamed(broken.tensors, "model.", "wrapped.text.")
    with pytest.raises(CheckpointError) as caught:
        open_source(broken.write(tmp_path))
    message = str(caught.value)
    assert "57 missing" in message and "57 unknown" in message
    listed = message.split("unknown")[1].split("wrong shape")[0]
    assert listed.count("wrapped.text.") == 5
    assert "wrapped.text.layers.0.input_layernorm.weight" in listed
    assert "[closest known: layers.N.input_layernorm.weight]" in listed


def test_vision_tensors_are_left_alone(folder, tmp_path):
    model = folder("gemma4_rand/target")
    model.tensors = renamed(model.tensors, "model.", "model.language_model.")
    model.tensors["model.vision_tower.patch.weight"] = np.ones((2, 2), np.float32)
    model.tensors["model.language_model.layers.0.self_attn.rotary_emb.inv_freq"] = (
        np.ones(8, np.float32)
    )
    open_source(model.write(tmp_path))


def test_missing_extra_and_misshapen_are_counted(folder, tmp_path):
    broken = folder("llama_rand/target")
    for layer in (1, 2):
        del broken.tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
    broken.tensors["model.layers.0.mlp.upp_proj.weight"] = np.ones(3, np.float32)
    broken.tensors["model.norm.weight"] = np.ones(63, np.float32)
    with pytest.raises(CheckpointError) as caught:
        open_source(broken.write(tmp_path))
    message = str(caught.value)
    assert "2 missing (layers.1.mlp.up_proj.weight, layers.2.mlp.up_proj" in message
    assert "1 unknown (layers.0.mlp.upp_proj.weight [closest known" in message
    assert "1 of the wrong shape (norm.weight (63,) instead of (64,))" in message


def test_bias_that_the_config_does_not_name_is_an_error(folder, tmp_path):
    broken = folder("llama_rand/target")
    broken.tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(64, np.float32)
    with pytest.raises(CheckpointError, match=r"1 unknown .*q_proj\.bias"):
        open_source(broken.write(tmp_path))


def test_tied_head_that_agrees_is_not_read_twice(folder, tmp_path):
    model = folder("llama_rand/target")
    model.tensors["lm_head.weight"] = model.tensors["model.embed_tokens.weight"].copy()
    source = open_source(model.write(tmp_path / "equal"))
    assert ("lm_head", "weight") not in source.shapes
    model.tensors["lm_head.weight"][0, 0] += 1
    with pytest.raises(CheckpointError, match="ties the output head"):
        open_source(model.write(tmp_path / "differs"))


def test_tied_table_under_the_head_name(folder, tmp_path):
    model = folder("llama_rand/target")
    table = model.tensors.pop("model.embed_tokens.weight")
    model.tensors["lm_head.weight"] = table
    source = open_source(model.write(tmp_path))
    np.testing.assert_array_equal(source.read_leaf(("embed", "weight")), table)


def test_tied_table_absent(folder, tmp_path):
    model = folder("llama_rand/target")
    del model.tensors["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing \(embed_tokens\.weight\)"):
        open_source(model.write(tmp_path))


def test_untied_head_absent(folder, tmp_path):
    model = folder("qwen3_rand/target")
    del model.tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing \(lm_head\.weight\)"):
        open_source(model.write(tmp_path))


def test_draft_without_tables_uses_the_targets(folder, tmp_path):
    model = folder("qwen3_rand/draft_vanilla")
    stored = open_source(model.write(tmp_path / "own"))
    shared = open_source(tmp_path / "own", tables="target")
    del model.tensors["embed_tokens.weight"], model.tensors["lm_head.weight"]
    bare = open_source(model.write(tmp_path / "bare"))
    assert stored.config.own_embed and stored.config.own_head
    assert bare.config == shared.config
    assert not bare.config.own_embed and not bare.config.own_head
    assert set(stored.shapes) - set(bare.shapes) == {
        ("embed", "weight"),
        ("lm_head", "weight"),
    }


def test_reduced_vocabulary_becomes_absolute_ids(speculators, tmp_path):
    want = np.flatnonzero(speculators.tensors["t2d"])
    source = open_source(speculators.write(tmp_path))
    ids = source.read_leaf(("d2t",))
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, want)
    assert source.shapes[("markov", "w1", "weight")].shape == (320, 16)
    assert source.shapes[("markov", "w2", "weight")].shape == (40, 16)
    assert source.shapes[("lm_head", "weight")].shape == (40, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["d2t"].__setitem__(1, t["d2t"][0] - 1), "several draft ids"),
        (lambda t: t["d2t"].__setitem__(39, 320), "maps to ids"),
        (lambda t: t["t2d"].__setitem__(slice(None), True), "differ"),
        (lambda t: t.pop("d2t"), "no tensor `d2t`"),
        (lambda t: t.pop("lm_head.weight"), "no lm_head.weight"),
        (lambda t: t.__setitem__("d2t", t["d2t"][:39].copy()), "has shape"),
    ],
)
def test_id_maps_that_contradict(speculators, tmp_path, change, message):
    change(speculators.tensors)
    with pytest.raises(CheckpointError, match=message):
        open_source(speculators.write(tmp_path))
