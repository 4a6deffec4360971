"""Small checkpoints in every published format."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

TARGETS = ("llama_rand/target", "qwen3_rand/target", "gemma4_rand/target")
DRAFTS = (
    "qwen3_rand/draft_vanilla",
    "qwen3_rand/draft_gated",
    "qwen3_rand/draft_rnn",
    "qwen3_rand/draft_dflash",
    "qwen3_rand/draft_dflash_conf",
    "qwen3_trained/draft",
    "gemma4_rand/draft",
)


class Folder:
    """An editable copy of a checkpoint: change it, then write it anywhere."""

    def __init__(self, source: Path) -> None:
        self.config = json.loads((source / "config.json").read_text())
        self.tensors = load_file(source / "model.safetensors")

    def copy(self) -> "Folder":
        return copy.deepcopy(self)

    def write(self, folder: Path, shards: int = 1) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if shards == 1:
            save_file(self.tensors, folder / "model.safetensors")
            return folder
        names = sorted(self.tensors)
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            part = {name: self.tensors[name] for name in names[i::shards]}
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


@pytest.fixture
def folder(data_dir):
    """folder("llama_rand/target") is an editable copy."""
    return lambda name: Folder(data_dir / name)


@pytest.fixture
def speculators(folder) -> Folder:
    """A draft in the speculators layout with a reduced vocabulary of 40 ids."""
    base = folder("qwen3_rand/draft_vanilla")
    inner = {
        key: base.config[key]
        for key in (
            "model_type",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "num_hidden_layers",
            "head_dim",
            "rms_norm_eps",
            "rope_parameters",
            "vocab_size",
            "max_position_embeddings",
            "layer_types",
        )
    }
    base.config = {
        "speculators_model_type": "dspark",
        "architectures": ["DSparkSpeculator"],
        "transformer_layer_config": inner,
        "aux_hidden_state_layer_ids": [1, 3, 4],
        "block_size": 7,
        "draft_vocab_size": 40,
        "mask_token_id": 319,
        "markov_rank": 16,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "dtype": "float32",
    }
    ids = np.sort(np.random.default_rng(5).permutation(320)[:40])
    tensors = base.tensors
    del tensors["embed_tokens.weight"]
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        tensors[name] = np.ascontiguousarray(tensors[name][ids])
    tensors["d2t"] = ids - np.arange(40)
    tensors["t2d"] = np.isin(np.arange(320), ids)
    return base
