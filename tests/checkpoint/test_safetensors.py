"""Headers, shards and the index, before any tensor is read."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax.checkpoint import tensors
from dspark_jax.checkpoint.safetensors_source import SafetensorsFolder
from dspark_jax.checkpoint.source import open_source
from dspark_jax.checkpoint.tensors import read
from dspark_jax.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def test_reads_what_was_written(folder, tmp_path, monkeypatch):
    # Smaller than any tensor, so that every one comes in pieces.
    monkeypatch.setattr(tensors, "PIECE_BYTES", 100)
    model = folder("llama_rand/target")
    files = SafetensorsFolder(model.write(tmp_path, shards=3))
    assert len(files.files) == 3
    assert set(files.info) == set(model.tensors)
    for name, value in model.tensors.items():
        np.testing.assert_array_equal(read(files, name), value)
        narrow = read(files, name, np.dtype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(narrow, value.astype(ml_dtypes.bfloat16))


def test_bfloat16_widens_exactly(rng, tmp_path):
    value = rng.standard_normal((5, 7)).astype(ml_dtypes.bfloat16)
    save_file({"a": value}, tmp_path / "model.safetensors")
    files = SafetensorsFolder(tmp_path)
    got = read(files, "a", np.dtype(np.float32))
    np.testing.assert_array_equal(got, value.astype(np.float32))


def test_overflow_to_float16_is_an_error(tmp_path):
    save_file({"a": np.array([1e6], np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="beyond float16"):
        read(SafetensorsFolder(tmp_path), "a", np.dtype(np.float16))


@pytest.mark.parametrize("shards", [1, 3])
def test_fr39_truncated_shard(folder, tmp_path, shards):
    folder("llama_rand/target").write(tmp_path, shards)
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    last = max(
        (name for name in header if name != "__metadata__"),
        key=lambda name: header[name]["data_offsets"],
    )
    shard.write_bytes(data[:-8])
    with pytest.raises(CheckpointError) as caught:
        open_source(tmp_path)
    assert shard.name in str(caught.value) and last in str(caught.value)
    # Cut further, an earlier tensor is the first that does not fit.
    shard.write_bytes(data[: 8 + length + 16])
    first = min(
        (name for name in header if name != "__metadata__"),
        key=lambda name: header[name]["data_offsets"],
    )
    with pytest.raises(CheckpointError, match=first):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data + b"1234", "after its last tensor"),
        (lambda data: data[:4], "cut short"),
        (lambda data: b"\xff" * 8 + data[8:], "cut short or no safetensors"),
        (lambda data: data[:8] + b"#" + data[9:], "no valid header"),
        (lambda data: data.replace(b'"F32"', b'"F99"'), "F99"),
        (lambda data: data.replace(b'"shape":[64]', b'"shape":[65]'), "takes 260"),
    ],
)
def test_damaged_file(folder, tmp_path, spoil, message):
    folder("llama_rand/target").write(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path)


def edit_index(tmp_path, change):
    index = json.loads((tmp_path / INDEX).read_text())
    change(index["weight_map"])
    (tmp_path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("model.norm.weight"), r"1 stored .*model\.norm\.weight"),
        (
            lambda m: m.update(extra="model-00001-of-00003.safetensors"),
            r"1 listed tensors .*extra",
        ),
        (
            lambda m: m.update(
                {"model.norm.weight": "model-00009-of-00003.safetensors"}
            ),
            "1 files that are not in",
        ),
        (lambda m: m.update({"a": "../b.safetensors"}), "not read"),
        (lambda m: m.update({"a": "pytorch_model.bin"}), "not read"),
    ],
)
def test_index_disagrees_with_shards(folder, tmp_path, change, message):
    folder("llama_rand/target").write(tmp_path, shards=3)
    edit_index(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path)


def test_tensor_in_another_shard_than_listed(folder, tmp_path):
    folder("llama_rand/target").write(tmp_path, shards=3)

    def swap(weight_map):
        file = weight_map["model.norm.weight"]
        others = sorted(set(weight_map.values()) - {file})
        weight_map["model.norm.weight"] = others[0]

    edit_index(tmp_path, swap)
    with pytest.raises(CheckpointError, match="1 listed tensors"):
        open_source(tmp_path)


def test_missing_shard_and_missing_index(folder, tmp_path):
    folder("llama_rand/target").write(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003.safetensors"):
        open_source(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CheckpointError, match="2 safetensors files but no"):
        open_source(tmp_path)


def test_pickles_are_refused_by_name(folder, tmp_path):
    folder("llama_rand/target").write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "x.pth", "y.ckpt", "z.pkl"):
        file = tmp_path / name
        file.write_bytes(b"never opened")
        for path in (tmp_path, file):
            with pytest.raises(CheckpointError, match=f"{name}: pickled"):
                open_source(path)
        file.unlink()


def test_paths_that_are_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_source(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_source(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        open_source(tmp_path / "notes.txt")


def test_integer_weights_are_refused(folder, tmp_path):
    model = folder("llama_rand/target")
    model.tensors["model.norm.weight"] = np.ones(64, np.int32)
    with pytest.raises(CheckpointError, match=r"norm\.weight is stored as int32"):
        open_source(model.write(tmp_path))
