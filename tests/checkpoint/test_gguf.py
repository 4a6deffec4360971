"""GGUF files made from a golden checkpoint: equal parameters, named errors."""

import json

import gguf
import ml_dtypes
import numpy as np
import pytest

from dspark_jax.checkpoint.convert import convert
from dspark_jax.checkpoint.gguf_source import gguf_metadata, half_split
from dspark_jax.checkpoint.load import read_config, read_params
from dspark_jax.checkpoint.source import open_source
from dspark_jax.config import RopeConfig
from dspark_jax.errors import CheckpointError
from dspark_jax.models.params import flatten
from tests.checkpoint.test_convert import assert_same

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}


def interleaved(weight, heads):
    """The order in which such files store query and key rows."""
    d = weight.shape[0] // heads
    halves = weight.reshape(heads, 2, d // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path, model, *, permute=True, kind=None, extra=None, tensors=None, arch="llama"
):
    writer = gguf.GGUFWriter(path, arch)
    config = model.config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_eos_token_id(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(300)])
    for key, value in (extra or {}).items():
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
        }
        add[type(value)](key, value)
    for name, value in {**model.tensors, **(tensors or {})}.items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if permute and ".attn_q." in name:
            value = interleaved(value, config["num_attention_heads"])
        if permute and ".attn_k." in name:
            value = interleaved(value, config["num_key_value_heads"])
        if kind is not None and value.ndim == 2:
            data = gguf.quantize(value, kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def llama(folder):
    return folder("llama_rand/target")


def test_loads_equal_to_the_published_folder(llama, data_dir, tmp_path):
    _, want_config, want = read_params(data_dir / "llama_rand/target")
    path = write_gguf(tmp_path / "model.gguf", llama)
    kind, config, params = read_params(path)
    assert kind == "target"
    assert config.full == want_config.full
    assert config.rms_norm_eps == 1e-5 and config.full.rope.theta == 1e5
    assert config.tie_embeddings and config.eos_ids == (0,)
    # 300 tokens, 320 rows.
    assert config.valid_vocab == 300 and config.vocab_size == 320
    assert config.dtype == "float32"
    want = {key: np.asarray(leaf) for key, leaf in flatten(want).items()}
    assert_same(params, want)
    # The same file with rows as published must not pass.
    wrong = write_gguf(tmp_path / "wrong.gguf", llama, permute=False)
    q_proj = ("layers", "full", "q_proj", "weight")
    got = flatten(read_params(wrong)[2])
    assert not np.array_equal(got[q_proj], want[q_proj])
    v_proj = ("layers", "full", "v_proj", "weight")
    np.testing.assert_array_equal(got[v_proj], want[v_proj])


def test_half_split_by_hand():
    rows = np.arange(8)[:, None]
    # Two heads of four rows: pairs (0, 1), (2, 3) become halves (0, 2), (1, 3).
    assert half_split(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    np.testing.assert_array_equal(half_split(interleaved(rows, 2), 2), rows)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (gguf.GGMLQuantizationType.F16, 2**-11),
        (gguf.GGMLQuantizationType.BF16, 2**-8),
        (gguf.GGMLQuantizationType.Q8_0, 2**-7),
        (gguf.GGMLQuantizationType.Q4_1, 0.07),
    ],
)
def test_stored_formats(llama, data_dir, tmp_path, kind, tolerance):
    path = write_gguf(tmp_path / "model.gguf", llama, kind=kind)
    _, config, params = read_params(path, dtype="float32")
    _, _, want = read_params(data_dir / "llama_rand/target")
    for key, leaf in flatten(want).items():
        error = np.abs(np.asarray(flatten(params)[key]) - leaf).max()
        assert error <= tolerance * np.abs(leaf).max(), key
    dtype = "float16" if kind.name == "F16" else "bfloat16"
    assert read_config(path)[1].dtype == dtype
    narrow = flatten(read_params(path)[2])[("embed", "weight")]
    assert narrow.dtype == (np.float16 if kind.name == "F16" else ml_dtypes.bfloat16)


def test_untied_head_and_biases(llama, tmp_path):
    head = llama.tensors["model.embed_tokens.weight"] + 1
    bias = {
        f"model.layers.{i}.self_attn.{name}.bias": np.full(n, i + 1.0, np.float32)
        for i in range(4)
        for name, n in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 64))
    }
    tensors = {"output.weight": head, **bias}
    path = write_gguf(tmp_path / "model.gguf", llama, tensors=tensors)
    _, config, params = read_params(path)
    assert not config.tie_embeddings and config.attention_bias
    np.testing.assert_array_equal(params["lm_head"]["weight"], head)
    q_bias = params["layers"]["full"]["q_proj"]["bias"]
    np.testing.assert_array_equal(q_bias[:, 0], [1, 2, 3, 4])


def test_conversion_keeps_the_tokenizer(llama, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", llama)
    convert(path, tmp_path / "out")
    assert_same(
        read_params(tmp_path / "out")[2],
        {key: np.asarray(leaf) for key, leaf in flatten(read_params(path)[2]).items()},
    )
    assert read_config(tmp_path / "out")[1] == read_config(path)[1]
    kept = json.loads((tmp_path / "out/tokenizer/tokenizer_gguf.json").read_text())
    metadata = gguf_metadata(path)
    want = {k: v for k, v in metadata.items() if k.startswith("tokenizer.")}
    assert kept == want
    assert kept["tokenizer.ggml.tokens"][299] == "t299"
    assert kept["tokenizer.ggml.eos_token_id"] == 0


def test_linear_and_yarn_scaling(llama, tmp_path):
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    path = write_gguf(tmp_path / "linear.gguf", llama, extra=linear)
    assert read_config(path)[1].full.rope == RopeConfig(1e5, "linear", 2.0)
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    path = write_gguf(tmp_path / "yarn.gguf", llama, extra=yarn)
    rope = RopeConfig(1e5, "yarn", 4.0, original_max_position=128)
    assert read_config(path)[1].full.rope == rope


def test_llama3_table_is_recognised(llama, tmp_path):
    # One of the eight wavelengths of this base lies between 8192 / 4 and 8192.
    llama.config["rope_parameters"]["rope_theta"] = 5e4
    rope = RopeConfig(5e4, "llama3", 8.0, original_max_position=8192)
    wavelength = 2 * np.pi * 5e4 ** (np.arange(8) / 8)
    smooth = np.clip((8192 / wavelength - 1) / (4 - 1), 0, 1)
    table = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    assert table[0] == 1 and table[-1] == 8 and np.unique(table).size == 3
    tensors = {"rope_freqs.weight": table}
    path = write_gguf(tmp_path / "model.gguf", llama, tensors=tensors)
    assert read_config(path)[1].full.rope == rope
    odd = {"rope_freqs.weight": table**2}
    path = write_gguf(tmp_path / "odd.gguf", llama, tensors=odd)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        open_source(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra": {"llama.rope.scaling.type": "longrope"}}, "longrope"),
        ({"extra": {"llama.rope.scaling.yarn_log_multiplier": 0.1}}, "yarn_log"),
        ({"extra": {"llama.expert_count": 8}}, "expert_count"),
        ({"extra": {"llama.attention.value_length": 8}}, "different length"),
        ({"tensors": {"blk.0.ffn_extra.weight": np.ones(4, np.float32)}}, "1 unknown"),
        ({"arch": "qwen3"}, "architecture 'qwen3'"),
    ],
)
def test_refused_by_name(llama, tmp_path, options, message):
    path = write_gguf(tmp_path / "model.gguf", llama, **options)
    with pytest.raises(CheckpointError, match=message):
        open_source(path)


def test_missing_tensor(llama, tmp_path):
    del llama.tensors["model.layers.3.mlp.down_proj.weight"]
    path = write_gguf(tmp_path / "model.gguf", llama)
    with pytest.raises(
        CheckpointError, match=r"1 missing \(blk\.3\.ffn_down\.weight\)"
    ):
        open_source(path)


def test_type_that_cannot_be_decoded(llama, tmp_path):
    del llama.tensors["model.embed_tokens.weight"]
    kind = gguf.GGMLQuantizationType.Q8_1
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.zeros((320, 64 // block * nbytes), np.uint8)
    path = tmp_path / "model.gguf"
    original = gguf.GGUFWriter.write_header_to_file

    def add_raw(writer, *args, **kwargs):
        writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
        return original(writer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", add_raw)
        write_gguf(path, llama)
    with pytest.raises(CheckpointError, match="Q8_1 cannot be decoded"):
        open_source(path)


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -8])
def test_truncated_file(llama, tmp_path, keep):
    path = write_gguf(tmp_path / "model.gguf", llama)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.gguf is cut short"):
        open_source(path)


def test_more_tokens_than_rows(llama, tmp_path):
    llama.tensors["model.embed_tokens.weight"] = np.ones((299, 64), np.float32)
    path = write_gguf(tmp_path / "model.gguf", llama)
    with pytest.raises(
        CheckpointError, match="299 is smaller than the tokenizer's 300"
    ):
        open_source(path)
