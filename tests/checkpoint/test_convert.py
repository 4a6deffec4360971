"""Published checkpoint -> Orbax directory -> the same parameters."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.checkpoint import store
from dspark_jax.checkpoint.convert import convert, verify_stored
from dspark_jax.checkpoint.load import read_config, read_params
from dspark_jax.checkpoint.source import open_source
from dspark_jax.config_draft import DraftConfig
from dspark_jax.errors import CheckpointError
from dspark_jax.models.params import flatten
from tests.checkpoint.conftest import DRAFTS, TARGETS

RENAMED = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "pre_feedforward_norm",
    "post_feedforward_layernorm": "post_feedforward_norm",
    "layer_scalar": "layer_scalar.weight",
}


def published_tree(folder, config):
    """Parameters put together from the file alone, by name."""
    backbone = config.backbone if isinstance(config, DraftConfig) else config
    tree, stacks = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("model.").replace("self_attn.", "").replace("mlp.", "")
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        name = name.replace("embed_tokens", "embed")
        name = name.replace("markov_head.", "markov.").replace("markov_w", "w")
        name = name.replace("gate_proj", "gate") if "markov" in name else name
        name = name.replace("joint_proj", "joint")
        name = name.replace("confidence_head.proj", "confidence")
        if found := re.match(r"layers\.(\d+)\.(.*)", name):
            kind = backbone.layer_types[int(found[1])]
            key = ("layers", kind, *found[2].split("."))
            stacks.setdefault(key, {})[int(found[1])] = value
        else:
            tree[tuple(name.split("."))] = value
    for key, layers in stacks.items():
        tree[key] = np.stack([layers[i] for i in sorted(layers)])
    return tree


def assert_same(params, want):
    got = flatten(params)
    assert set(got) == set(want)
    for key, value in want.items():
        assert got[key].dtype == value.dtype, key
        np.testing.assert_array_equal(got[key], value, err_msg=str(key))


@pytest.mark.parametrize("name", [*TARGETS, *DRAFTS])
def test_round_trip(data_dir, tmp_path, name):
    made = convert(data_dir / name, tmp_path / "out")
    kind, config, params = read_params(tmp_path / "out")
    direct = read_params(data_dir / name)
    assert kind == direct[0] == ("draft" if "draft" in name else "target")
    assert config == direct[1] == read_config(tmp_path / "out")[1]
    want = published_tree(data_dir / name, config)
    assert_same(params, want)
    assert_same(direct[2], want)
    assert made.verified and made.nbytes == sum(x.nbytes for x in want.values())
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    # One leaf of another layer order would not pass.
    if "layers" in params:
        key = next(key for key in want if key[0] == "layers")
        assert not np.array_equal(want[key], want[key][::-1])


def test_sharded_source_and_reduced_vocabulary(folder, speculators, tmp_path):
    sharded = folder("qwen3_rand/target").write(tmp_path / "sharded", shards=4)
    convert(sharded, tmp_path / "a")
    assert_same(read_params(tmp_path / "a")[2], flatten(read_params(sharded)[2]))
    reduced = speculators.write(tmp_path / "reduced")
    convert(reduced, tmp_path / "b")
    _, config, params = read_params(tmp_path / "b")
    assert config.draft_vocab_size == 40
    ids = np.flatnonzero(speculators.tensors["t2d"])
    np.testing.assert_array_equal(params["d2t"], ids)
    assert params["d2t"].dtype == np.int32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype(data_dir, tmp_path, dtype):
    source = data_dir / "llama_rand/target"
    convert(source, tmp_path / "narrow", dtype=dtype)
    convert(source, tmp_path / "stored")
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    tree = published_tree(source, read_config(source)[1])
    want = {key: value.astype(numpy_dtype) for key, value in tree.items()}
    for path, asked in (
        (tmp_path / "narrow", None),
        (tmp_path / "stored", dtype),
        (source, dtype),
    ):
        _, config, params = read_params(path, dtype=asked)
        assert config.dtype == dtype
        assert_same(params, want)
    with pytest.raises(ValueError, match="int8"):
        read_params(source, dtype="int8")


def test_tables_of_a_draft_can_be_left_out(data_dir, tmp_path):
    convert(data_dir / "qwen3_rand/draft_rnn", tmp_path / "out")
    _, config, params = read_params(tmp_path / "out", tables="target")
    assert not config.own_embed and not config.own_head
    assert "embed" not in params and "lm_head" not in params and "fc" in params


def test_metadata(data_dir, tmp_path):
    convert(data_dir / "gemma4_rand/draft", tmp_path / "out")
    header = store.read_header(tmp_path / "out")
    assert header.kind == "draft"
    assert header.source["architecture"] == "Gemma4DSparkModel"
    assert header.source["name"] == "draft"
    assert str(tmp_path) not in json.dumps(dict(header.source))
    assert set(header.checksums) == {".".join(key) for key in header.shapes}


def test_fr47_no_random_keys(data_dir, tmp_path):
    convert(data_dir / "qwen3_rand/draft_rnn", tmp_path / "out")
    for leaf in jax.tree.leaves(read_params(tmp_path / "out")[2]):
        assert not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def test_fr20_windows_survive_conversion(folder, tmp_path):
    model = folder("qwen3_rand/target")
    model.config |= {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
    }
    beyond = [n for n in model.tensors if re.search(r"layers\.[2-9]\.", n)]
    for name in beyond:
        del model.tensors[name]
    source = model.write(tmp_path / "in")
    convert(source, tmp_path / "out")
    _, config, params = read_params(tmp_path / "out")
    assert config.layer_types == ("sliding", "full")
    assert config.sliding.window == 2048 and config.full.window is None
    for kind, layer in (("sliding", 0), ("full", 1)):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        leaf = params["layers"][kind]["up_proj"]["weight"]
        np.testing.assert_array_equal(leaf, model.tensors[name][None])


TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 299}, "merges": []},
    "added_tokens": [{"id": 310, "content": "<end>"}],
}


def test_tokenizer_files_and_end_ids(folder, tmp_path):
    source = folder("llama_rand/target").write(tmp_path / "in")
    (source / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"eos_token_id": [0, 310]}')
    (source / "README.md").write_text("")
    convert(source, tmp_path / "out")
    _, config = read_config(tmp_path / "out")
    assert config.eos_ids == (0, 310)
    # Rows 311..319 of the table are padding.
    assert config.vocab_size == 320 and config.valid_vocab == 311
    kept = {file.name for file in (tmp_path / "out/tokenizer").iterdir()}
    assert kept == {"tokenizer.json", "chat_template.jinja", "generation_config.json"}


def test_vocabulary_smaller_than_the_tokenizer(folder, tmp_path):
    source = folder("llama_rand/target").write(tmp_path / "in")
    large = {**TOKENIZER, "added_tokens": [{"id": 320, "content": "<end>"}]}
    (source / "tokenizer.json").write_text(json.dumps(large))
    with pytest.raises(
        CheckpointError, match="320 is smaller than the tokenizer's 321"
    ):
        convert(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_fr40_ties_are_settled_before_the_first_write(data_dir, tmp_path, monkeypatch):
    order = []

    def record(dst, kind, config, source, leaves, finish):
        order.append(("config", config.tie_embeddings))
        order.extend(("write", path) for path, _ in leaves)

    monkeypatch.setattr(store, "save_streaming", record)
    convert(data_dir / "llama_rand/target", tmp_path / "out")
    assert order[0] == ("config", True)
    written = [path for step, path in order[1:]]
    assert ("embed", "weight") in written
    assert ("lm_head", "weight") not in written
    assert len(written) == len(set(written)) == 11


def spoil_names(folder):
    del folder.tensors["model.norm.weight"]


def spoil_architecture(folder):
    folder.config["architectures"] = ["OPTForCausalLM"]


@pytest.mark.parametrize("spoil", [spoil_names, spoil_architecture])
def test_errors_come_before_any_write(folder, tmp_path, spoil):
    broken = folder("llama_rand/target")
    spoil(broken)
    broken.write(tmp_path / "in")
    with pytest.raises(CheckpointError):
        convert(tmp_path / "in", tmp_path / "deep/out")
    assert os.listdir(tmp_path) == ["in"]


def test_destination_that_is_taken(data_dir, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    # An empty directory and a relative path are fine.
    convert(data_dir / "llama_rand/target", "out")
    before = sorted((tmp_path / "out").rglob("*"))
    with pytest.raises(CheckpointError, match="already exists"):
        convert(data_dir / "qwen3_rand/target", "out")
    assert sorted((tmp_path / "out").rglob("*")) == before
    with pytest.raises(CheckpointError, match="converted checkpoint already"):
        convert("out", "again")


def test_verify_finds_changed_bytes(data_dir, tmp_path):
    out = tmp_path / "out"
    convert(data_dir / "llama_rand/target", out, verify=False)
    verify_stored(out)
    files = [path for path in (out / "state").rglob("d/*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CheckpointError, match="read back differently|cannot read"):
        verify_stored(out)


def test_failed_verification_leaves_nothing(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "stored_checksum", lambda *args: 0)
    with pytest.raises(CheckpointError, match="11 parameters read back differently"):
        convert(data_dir / "llama_rand/target", tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_interrupted_conversion_leaves_nothing(data_dir, tmp_path):
    def stop(step, done, total):
        if step == "verify":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(data_dir / "llama_rand/target", tmp_path / "out", progress=stop)
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
from dspark_jax.checkpoint.convert import convert

def stop(step, done, total):
    if step == sys.argv[3] and done >= float(sys.argv[4]) * total:
        os.kill(os.getpid(), signal.SIGKILL)

convert(sys.argv[1], sys.argv[2], progress=stop)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "share"),
    [("write", 0.0), ("write", 0.5), ("verify", 0.0), ("verify", 1.0)],
)
def test_killed_conversion_leaves_nothing_that_loads(data_dir, tmp_path, step, share):
    out = tmp_path / "out"
    source = str(data_dir / "llama_rand/target")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, source, str(out), step, str(share)],
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == -9
    assert not out.exists()
    left = list(tmp_path.rglob("*"))
    assert left
    for path in left:
        with pytest.raises(CheckpointError):
            read_params(path)
    # And nothing stands in the way of doing it again.
    convert(source, out)
    assert read_config(out)[0] == "target"


def test_progress_counts_all_bytes(data_dir, tmp_path):
    calls = []
    made = convert(
        data_dir / "llama_rand/target",
        tmp_path / "out",
        progress=lambda *call: calls.append(call),
    )
    for step in ("write", "verify"):
        done = [call[1] for call in calls if call[0] == step]
        assert done == sorted(done) and done[-1] == made.nbytes
    assert {call[2] for call in calls} == {made.nbytes}


def test_source_reads_the_largest_family_first(data_dir):
    from dspark_jax.checkpoint.load import read_leaves

    source = open_source(data_dir / "llama_rand/target")
    sizes = [value.size for _, value in read_leaves(source)]
    assert sizes == sorted(sizes, reverse=True)
