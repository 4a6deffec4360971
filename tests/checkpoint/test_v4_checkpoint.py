"""DeepSeek-V4 checkpoints: published folder, converted directory, other spellings."""

import dataclasses
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
from dspark_jax.checkpoint.safetensors_source import SafetensorsFolder, write_tensors
from dspark_jax.checkpoint.tensors import read
from dspark_jax.config import to_json
from dspark_jax.config_draft import draft_from_json, target_from_json
from dspark_jax.errors import CheckpointError
from dspark_jax.models.deepseek_v4.weights import expand_fp4, expand_fp8
from dspark_jax.models.params import flatten
from dspark_jax.testing.tiny_v4 import write_tiny_v4
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


class Folder:
    """A checkpoint's settings and tensors, to change and write anywhere."""

    def __init__(self, path):
        files = SafetensorsFolder(path)
        self.config = json.loads((path / "config.json").read_text())
        self.tensors = {name: read(files, name) for name in files.info}

    def write(self, path, **tensors):
        """`tensors` replace others."""
        path.mkdir()
        (path / "config.json").write_text(json.dumps(self.config))
        write_tensors(path / "model.safetensors", self.tensors | tensors)
        return path


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


def assert_same(params, want):
    got, want = flatten(params), flatten(want)
    assert set(got) == set(want)
    for key, value in want.items():
        assert got[key].dtype == value.dtype, key
        np.testing.assert_array_equal(got[key], value, err_msg=str(key))


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


# Authors' name in a layer -> that of the `transformers` class. Written out here,
# as the library's own table is what is tested.
HF_LAYER = {
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    **{
        f"hc_{where}_{what}": f"{where}_hc.{what}"
        for where in ("attn", "ffn")
        for what in ("fn", "base", "scale")
    },
    **{
        f"attn.{ours}compressor.{one}": f"self_attn.compressor.{theirs}{other}"
        for ours, theirs in (("", ""), ("indexer.", "indexer."))
        for one, other in (
            ("wkv.weight", "kv_proj.weight"),
            ("wgate.weight", "gate_proj.weight"),
            ("ape", "position_bias"),
            ("norm.weight", "kv_norm.weight"),
        )
    },
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": (
        "self_attn.compressor.indexer.scorer.weights_proj.weight"
    ),
}
HF_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}


def hf_tensors(native, experts):
    """A float model's tensors as the `transformers` class stores them; no draft."""
    found = {}
    for name, value in native.items():
        if name.startswith("mtp.") or ".ffn.experts." in name:
            continue
        if name in HF_TOP:
            found[HF_TOP[name]] = value
        else:
            _, layer, rest = name.split(".", 2)
            wide = value.astype(np.int64) if rest.endswith("tid2eid") else value
            found[f"model.layers.{layer}.{HF_LAYER[rest]}"] = wide
    layers = {name.split(".")[1] for name in native if name.startswith("layers.")}
    for layer in layers:
        w1, w2, w3 = (
            np.stack(
                [native[f"layers.{layer}.ffn.experts.{e}.{w}.weight"]
                 for e in range(experts)]
            )
            for w in ("w1", "w2", "w3")
        )  # fmt: skip
        base = f"model.layers.{layer}.mlp.experts"
        found[f"{base}.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
        found[f"{base}.down_proj"] = w2
    return found


@pytest.fixture
def transformers_folder(data_dir):
    """The recorded float model as the `transformers` class stores it."""
    made = Folder(data_dir / "deepseek_v4/a")
    made.tensors = hf_tensors(made.tensors, made.config["n_routed_experts"])
    made.config = json.loads((data_dir / "deepseek_v4/hf_config.json").read_text())
    return made


def test_names_of_transformers(data_dir, transformers_folder, tmp_path):
    source = transformers_folder.write(tmp_path / "in")
    kind, config, params = read_params(source)
    native = read_params(data_dir / "deepseek_v4/a")
    assert_same(params, native[2])
    # The authors' file says nothing of the end of text, and its own length.
    same = {"eos_ids": config.eos_ids, "max_position": config.max_position}
    assert kind == native[0] and config.eos_ids == (1,) and native[1].eos_ids == ()
    assert config == dataclasses.replace(native[1], **same)
    convert(source, tmp_path / "out")
    assert_same(read_params(tmp_path / "out")[2], native[2])
    # Control: up before gate is another model.
    name = "model.layers.4.mlp.experts.gate_up_proj"
    gate, up = np.split(transformers_folder.tensors[name], 2, axis=1)
    turned = np.concatenate([up, gate], axis=1)
    wrong = transformers_folder.write(tmp_path / "wrong", **{name: turned})
    other = flatten(read_params(wrong)[2])
    w1, w3 = (("layers", "4", "ffn", "experts", w, "weight") for w in ("w1", "w3"))
    np.testing.assert_array_equal(other[w1], flatten(params)[w3])


def test_halves_are_read_one_by_one(transformers_folder, tmp_path, monkeypatch):
    """Memory never holds a fused tensor whole beside the half that is wanted."""
    source = transformers_folder.write(tmp_path / "in")
    spans, original = [], SafetensorsFolder.read_span_into

    def watched(self, name, first, out):
        spans.append((name, out.size))
        original(self, name, first, out)

    monkeypatch.setattr(SafetensorsFolder, "read_span_into", watched)
    params = flatten(read_params(source)[2])
    whole = params[("layers", "0", "ffn", "experts", "w1", "weight")].size
    fused = [size for name, size in spans if name.endswith("gate_up_proj")]
    # Six layers, w1 and w3, eight experts.
    assert len(fused) == 6 * 2 * 8 and set(fused) == {whole // 8}


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
