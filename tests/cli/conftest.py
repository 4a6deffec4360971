"""A tiny Llama on disk, in the published layout, with a draft in ours."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from dspark_jax.checkpoint.names import HF, declared_shapes, expected
from dspark_jax.checkpoint.native import write_native
from dspark_jax.cli import common
from dspark_jax.cli.main import app
from dspark_jax.model import load
from dspark_jax.models.params import flatten
from dspark_jax.testing import tiny_config, tiny_draft_config, tiny_model
from dspark_jax.text import load_tokenizer

TOKENIZER = Path(__file__).parents[1] / "data" / "tokenizer"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """Holds `target` and `draft`, which guesses at random."""
    root = tmp_path_factory.mktemp("tiny")
    vocab = load_tokenizer(TOKENIZER).size
    config = tiny_config("llama", vocab_size=vocab)
    model = tiny_model(target=config, draft=tiny_draft_config(config), stacked=True)
    assert model.spec.draft is not None
    target = shutil.copytree(TOKENIZER, root / "target")
    leaves = flatten(model.params["target"])
    tensors = {}
    for name, slot in expected(config, declared_shapes(config), HF).items():
        leaf = np.asarray(leaves[slot.path])
        tensor = leaf if slot.index is None else leaf[slot.index]
        tensors[name] = np.ascontiguousarray(tensor)
    save_file(tensors, target / "model.safetensors")
    published = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": 10000.0,
        "dtype": "float32",
    }
    (target / "config.json").write_text(json.dumps(published))
    write_native(root / "draft", model.spec.draft, model.params["draft"])
    return root


@pytest.fixture(scope="session")
def load_once():
    """Models are shared by the tests, and so are their compiled programs."""
    return functools.lru_cache(load)


@pytest.fixture
def run(monkeypatch, load_once):
    monkeypatch.setattr(common, "load", load_once)
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])
