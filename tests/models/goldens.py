"""Reference checkpoints and traces, read once, and how to compare with them.

The data were recorded from the reference implementation. Arrays of the traces that
no test reads are left out of the copies under `tests/data`, and most traces keep
hidden states and draft logits of the rounds in `kept_rounds` only.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax as dspark
from dspark_jax.checkpoint.load import fit_draft, read_params
from dspark_jax.models.params import Tree, for_cpu

DATA = Path(__file__).parent.parent / "data"
TARGETS = ("llama_rand", "qwen3_rand", "gemma4_rand", "qwen3_trained")
# Folder, draft, names of its greedy traces of prompts 0 and 1.
DRAFTS = {
    "vanilla": ("qwen3_rand", "draft_vanilla", "trace_vanilla_p{}"),
    "gated": ("qwen3_rand", "draft_gated", "trace_gated_p{}"),
    "rnn": ("qwen3_rand", "draft_rnn", "trace_rnn_p{}"),
    "dflash": ("qwen3_rand", "draft_dflash", "trace_dflash_p{}"),
    "dflash_conf": ("qwen3_rand", "draft_dflash_conf", "trace_dflash_conf_p{}"),
    "gemma4": ("gemma4_rand", "draft", "trace_p{}"),
    "trained": ("qwen3_trained", "draft", "trace_greedy_p{}"),
}


def tolerance(name: str) -> float:
    """Largest allowed `error`; Gemma4's test logits are sharper."""
    return 2e-4 if "gemma4" in name else 5e-5


def error(ours: object, reference: np.ndarray) -> float:
    """max |difference| / max |reference|."""
    ours = np.asarray(ours)
    assert ours.shape == reference.shape
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


@functools.cache
def read_target(folder: str) -> tuple[dspark.DecoderConfig, Tree]:
    """(config, stacked parameters) through the library's own reader."""
    kind, config, params = read_params(DATA / folder / "target")
    assert kind == "target"
    return config, params


@functools.cache
def read_draft(folder: str, draft: str) -> tuple[dspark.DraftConfig, Tree]:
    """(config, stacked parameters) of a draft that fits its folder's target."""
    kind, config, params = read_params(DATA / folder / draft)
    assert kind == "draft"
    return fit_draft(read_target(folder)[0], config, params)


@functools.cache
def pair(name: str) -> dspark.Model:
    """The model of an entry of `DRAFTS`, layers listed."""
    folder, draft, _ = DRAFTS[name]
    target_config, target = read_target(folder)
    draft_config, draft_params = read_draft(folder, draft)
    params = {"target": for_cpu(target), "draft": for_cpu(draft_params)}
    return dspark.make_model(dspark.Spec(target_config, draft_config), params)


@functools.cache
def arrays(path: str) -> dict[str, np.ndarray]:
    """The arrays of `tests/data/<path>.npz`."""
    with np.load(DATA / f"{path}.npz") as file:
        return dict(file)


def traces(name: str) -> list[dict[str, np.ndarray]]:
    """Both greedy traces of an entry of `DRAFTS`."""
    folder, _, pattern = DRAFTS[name]
    return [arrays(f"{folder}/{pattern.format(i)}") for i in (0, 1)]


def right_padded(lists: list, fill: int = 0) -> tuple[jax.Array, jax.Array]:
    """(tokens int32[B, P], lengths int32[B])."""
    lengths = np.asarray([len(x) for x in lists], np.int32)
    tokens = np.full((len(lists), lengths.max()), fill, np.int32)
    for row, ids in zip(tokens, lists, strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(tokens), jnp.asarray(lengths)
