"""DeepSeek-V4 checkpoints: published folder, converted directory, other spellings."""

import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dspark_jax.checkpoint import convert as converting
from dspark_jax.checkpoint import store
from dspark_jax.checkpoint.convert import convert, verify_stored
from dspark_jax.checkpoint.load import read_config, read_params
from dspark_jax.checkpoint.safetensors_source import write_tensors
from dspark_jax.config import to_json
from dspark_jax.config_draft import draft_from_json, target_from_json
from dspark_jax.errors import CheckpointError
from dspark_jax.models.deepseek_v4.weights import expand_fp4, expand_fp8
from dspark_jax.models.params import flatten
from dspark_jax.testing.tiny_v4 import write_tiny_v4
from tests.checkpoint.v4_folder import Folder, assert_same
from tests.models.quick import quick_jit

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
PARTS = ("target", "draft")
# A layer of each kind. Sizes that are no multiples of 128 have ragged last blocks.
SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128, 0, 0, 0],
    "num_hash_layers": 1,
    "num_attention_heads": 4,
    "o_groups": 2,
    "o_lora_rank": 32,
    "q_lora_rank": 160,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "n_routed_experts": 4,
    "moe_intermediate_size": 96,
    "dspark_target_layer_ids": [0, 1, 2],
    "dspark_markov_rank": 16,
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Scales are drawn at random: those of random weights would all be equal."""
    path = write_tiny_v4(tmp_path_factory.mktemp("v4") / "published", **SMALL)
    rng, tensors = np.random.default_rng(1), Folder(path).tensors
    for name, value in tensors.items():
        if value.dtype == E8M0:
            drawn = rng.integers(110, 130, value.shape, np.uint8)
            tensors[name] = drawn.view(E8M0)
    write_tensors(path / "model.safetensors", tensors)
    return path


@pytest.fixture
def folder(published):
    """An editable copy of `published`."""
    return Folder(published)


@pytest.fixture(scope="module")
def packed(published):
    """Kind, settings and parameters of both parts, as they are stored."""
    return {part: read_params(published, part=part) for part in PARTS}


def test_converted_is_what_was_published(published, packed, tmp_path):
    out = tmp_path / "out"
    made = convert(published, out)
    leaves = [leaf for part in PARTS for leaf in jax.tree.leaves(packed[part][2])]
    assert made.verified and made.kind == "target"
    assert made.nbytes == sum(leaf.nbytes for leaf in leaves)
    assert made.parameters == sum(leaf.size for leaf in leaves)
    assert os.listdir(tmp_path) == ["out"]
    for part, parse in zip(PARTS, (target_from_json, draft_from_json), strict=True):
        kind, config, params = packed[part]
        stored = read_params(out, part=part)
        assert stored[:2] == (kind, config) == read_config(out, part=part)
        assert kind == part
        assert_same(stored[2], params)
        assert parse(json.loads(json.dumps(to_json(config)))) == config
    config, params = packed["target"][1:]
    assert config.weights == packed["draft"][1].backbone.weights == "fp8_fp4"
    experts = params["layers"]["2"]["ffn"]["experts"]["w1"]
    assert experts["weight"].shape == (4, 96, 64)
    # Experts in another order, or a stage in another's place, would not pass.
    assert not np.array_equal(experts["weight"], experts["weight"][::-1])
    first, last = (packed["draft"][2]["layers"][i]["attn"] for i in "02")
    assert not np.array_equal(
        first["projections"]["wkv"]["weight"], last["projections"]["wkv"]["weight"]
    )
    with pytest.raises(CheckpointError, match="'bfloat16'; expand them when"):
        read_params(out, dtype="bfloat16")
    with pytest.raises(CheckpointError, match="'float32'; expand them when"):
        read_params(out, part="draft", dtype="float32")


def test_leaves_are_the_tensors_of_the_files(folder, packed):
    """Against the files alone, by the names in the published checkpoint."""
    target, draft = (flatten(packed[part][2]) for part in PARTS)
    for params, name, key in (
        (target, "layers.1.attn.wq_b", "layers.1.attn.projections.wq_b"),
        (target, "layers.1.attn.indexer.wq_b", "layers.1.attn.indexer.wq_b"),
        (target, "layers.0.ffn.shared_experts.w3", "layers.0.ffn.shared.w3"),
        (draft, "mtp.0.main_proj", "fc"),
        (draft, "mtp.1.attn.wo_a", "layers.1.attn.projections.wo_a"),
    ):
        for part in ("weight", "scale"):
            want = folder.tensors[f"{name}.{part}"].view(np.uint8)
            got = params[(*key.split("."), part)]
            np.testing.assert_array_equal(got, want, err_msg=name)
    for stage in range(3):
        for part in ("weight", "scale"):
            want = [
                folder.tensors[f"mtp.{stage}.ffn.experts.{e}.w2.{part}"]
                for e in range(4)
            ]
            got = draft[("layers", str(stage), "ffn", "experts", "w2", part)]
            np.testing.assert_array_equal(got, np.stack(want).view(np.uint8))


@quick_jit
def expanded_tree(params):
    """The tree with short floats expanded by the model's own functions."""
    flat, found = flatten(params), {}
    for path, leaf in flat.items():
        scale = flat.get((*path[:-1], "scale"))
        if path[-1] != "weight" or leaf.dtype != jnp.uint8:
            if leaf.dtype != jnp.uint8:
                found[".".join(path)] = leaf
            continue
        expand = jax.vmap(expand_fp4) if "experts" in path else expand_fp8
        found[".".join(path)] = expand(leaf, scale)
    return found


@pytest.mark.parametrize("part", PARTS)
def test_expanded(published, packed, tmp_path, part):
    want = expanded_tree(packed[part][2])
    kind, config, params = read_params(published, dtype="bfloat16", part=part)
    got = {".".join(path): leaf for path, leaf in flatten(params).items()}
    assert set(got) == set(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    layers = config.backbone if part == "draft" else config
    assert kind == part and layers.weights == "float" and layers.dtype == "bfloat16"
    # Every value of both formats is a bfloat16 number: float32 is no more exact.
    if part == "target":
        wide = flatten(read_params(published, dtype="float32")[2])
        name = ("layers", "1", "attn", "projections", "wq_b", "weight")
        assert wide[name].dtype == jnp.float32
        np.testing.assert_array_equal(wide[name], got[".".join(name)])
        # The converted directory of expanded parameters is a plain one.
        convert(published, tmp_path / "out", dtype="bfloat16")
        for one in PARTS:
            stored = read_params(tmp_path / "out", part=one)
            direct = read_params(published, dtype="bfloat16", part=one)
            assert stored[:2] == direct[:2]
            assert_same(stored[2], direct[2])


def without_stages(folder):
    folder.tensors = {
        name: value
        for name, value in folder.tensors.items()
        if not name.startswith("mtp.")
    }


def test_no_stages_no_draft(folder, packed, tmp_path):
    without_stages(folder)
    source = folder.write(tmp_path / "in")
    out = tmp_path / "out"
    convert(source, out)
    assert not (out / store.DRAFT).exists()
    assert_same(read_params(out)[2], packed["target"][2])
    with pytest.raises(CheckpointError, match=r"holds no draft \(no tensors `mtp"):
        read_params(source, part="draft")


def test_stages_are_counted_in_the_files(folder, packed, tmp_path):
    """`num_nextn_predict_layers` says 1, and ratios need not speak of stages."""
    assert folder.config["num_nextn_predict_layers"] == 1
    folder.config["compress_ratios"] = [0, 4, 128]
    source = folder.write(tmp_path / "in")
    kind, config = read_config(source, part="draft")
    assert kind == "draft" and config.backbone.num_layers == 3
    assert config == packed["draft"][1]


def flip(folder):
    """One bit of the largest file of parameters."""
    files = [file for file in (folder / "state").rglob("d/*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


@pytest.mark.parametrize("part", PARTS)
def test_verify_reads_both_parts(published, tmp_path, monkeypatch, part):
    """The byte changes after it was written, before it is read back."""
    seen = []

    def spoiled(path, progress):
        kind = store.read_header(path, unfinished=True).kind
        seen.append(kind)
        if kind == part:
            flip(path)
        verify_stored(path, progress)

    monkeypatch.setattr(converting, "verify_stored", spoiled)
    with pytest.raises(CheckpointError, match="read back differently|cannot read"):
        convert(published, tmp_path / "out")
    assert seen[-1] == part and os.listdir(tmp_path) == []


WEIGHT, SCALE = "layers.0.attn.wq_a.weight", "layers.0.attn.wq_a.scale"


def lose_scale(tensors):
    del tensors[SCALE]


def misshape_scale(tensors):
    tensors[SCALE] = np.ascontiguousarray(tensors[SCALE][:1])


def misshape_expert_scale(tensors):
    name = "layers.2.ffn.experts.3.w2.scale"
    tensors[name] = np.ascontiguousarray(tensors[name][:, :2])


def misspell(tensors):
    tensors["layers.0.attn.wq_z.weight"] = tensors[WEIGHT].view(np.uint8)


def misspell_stage(tensors):
    tensors["mtp.2.markov_head.markov_w3.weight"] = tensors["embed.weight"]


def widen(tensors):
    tensors[WEIGHT] = tensors[WEIGHT].astype(np.float32)


def whole_numbers(tensors):
    tensors["layers.0.ffn.gate.weight"] = np.zeros((4, 128), np.int8)


@pytest.mark.parametrize(
    ("spoil", "dtype", "message"),
    [
        (lose_scale, None, rf"1 missing \({SCALE}\)"),
        (lose_scale, "bfloat16", rf"{SCALE} of shape \(2, 1\), found None"),
        (misshape_scale, None, rf"{SCALE} \(1, 1\) instead of \(2, 1\)"),
        (misshape_scale, "bfloat16", r"of shape \(2, 1\), found \(1, 1\)"),
        (misshape_expert_scale, None, r"3\.w2\.scale \(128, 2\) instead of \(128, 3\)"),
        (misshape_expert_scale, "bfloat16", r"\(128, 3\), found \(128, 2\)"),
        (misspell, None, r"1 unknown \(layers\.0\.attn\.wq_z\.weight \[closest"),
        (misspell_stage, None, r"1 unknown \(mtp\.2\.markov_head\.markov_w3\.weight"),
        (widen, None, rf"{WEIGHT} is stored as float32: 8-bit and 4-bit weights are"),
        (whole_numbers, None, r"ffn\.gate\.weight is stored as int8; allowed: float32"),
    ],
)
def test_errors_come_before_any_write(folder, tmp_path, spoil, dtype, message):
    spoil(folder.tensors)
    source = folder.write(tmp_path / "in")
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "out", dtype=dtype)
    assert os.listdir(tmp_path) == ["in"]


def test_scales_in_float32(folder, packed, tmp_path):
    """Powers of two are kept as exponents; others only when they are expanded."""
    wide = {
        name: value.astype(np.float32)
        for name, value in folder.tensors.items()
        if value.dtype == E8M0
    }
    assert_same(
        read_params(folder.write(tmp_path / "wide", **wide))[2], packed["target"][2]
    )
    for name, change in (("odd", 1.5), ("negative", -1.0)):
        spoiled = wide | {SCALE: wide[SCALE] * np.float32(change)}
        source = folder.write(tmp_path / name, **spoiled)
        with pytest.raises(CheckpointError, match=f"{SCALE} has scales that are no"):
            convert(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        key = ("layers", "0", "attn", "projections", "wq_a", "weight")
        got = flatten(read_params(source, dtype="float32")[2])[key]
        want = folder.tensors[WEIGHT].astype(np.float32)
        factors = spoiled[SCALE].repeat(128, axis=0)[: want.shape[0]]
        np.testing.assert_array_equal(got, want * factors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": None}, "neither `compress_ratios` nor `layer_types`"),
        ({"compress_ratios": [0, 4]}, "has 2 entries for 3 layers"),
        ({"dspark_block_size": None}, "config.json has no `dspark_block_size`"),
        ({"scoring_func": "softmax"}, "`scoring_func` is 'softmax'"),
    ],
)
def test_settings_that_do_not_do(folder, tmp_path, change, message):
    folder.config |= change
    source = folder.write(tmp_path / "in")
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]
