"""A DeepSeek-V4 model under the names of the `transformers` class."""

import dataclasses
import json

import numpy as np
import pytest

from dspark_jax.checkpoint.convert import convert
from dspark_jax.checkpoint.load import read_params
from dspark_jax.checkpoint.safetensors_source import SafetensorsFolder
from dspark_jax.models.params import flatten
from tests.checkpoint.v4_folder import Folder, assert_same

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
