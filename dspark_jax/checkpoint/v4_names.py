"""Tensor names of DeepSeek-V4 checkpoints, as its authors publish them.

layers.N.attn.wq_a.weight, .scale      one tensor a parameter
layers.N.ffn.experts.E.w1.weight       one tensor an expert; here all in one array
mtp.I.*                                stages of the draft, in the same files
"""

from __future__ import annotations

from collections.abc import Mapping

from dspark_jax.checkpoint.names import Path

_LAYER: Mapping[Path, str] = {
    ("attn", "projections"): "attn",
    ("ffn", "shared"): "ffn.shared_experts",
}
_TOP: Mapping[Path, str] = {
    ("embed", "weight"): "embed.weight",
    ("lm_head", "weight"): "head.weight",
    ("norm", "weight"): "norm.weight",
    **{("hc_head", part): f"hc_head_{part}" for part in ("fn", "base", "scale")},
}


def native_names(path: Path, experts: int) -> list[str]:
    """Tensors that fill a parameter of a target: one, or one an expert."""
    if path[0] != "layers":
        return [_TOP[path]]
    return _in_layer(f"layers.{path[1]}", path[2:], experts)


def native_draft_names(path: Path, experts: int, stages: int) -> list[str]:
    """Tensors that fill a parameter of a draft."""
    if path[0] == "layers":
        return _in_layer(f"mtp.{path[1]}", path[2:], experts)
    last = f"mtp.{stages - 1}"
    names = {
        "fc": "mtp.0.main_proj",
        "hidden_norm": "mtp.0.main_norm",
        "norm": f"{last}.norm",
        "confidence": f"{last}.confidence_head.proj",
    }
    if path[0] == "hc_head":
        return [f"{last}.hc_head_{path[1]}"]
    if path[0] == "markov":
        return [f"{last}.markov_head.markov_{path[1]}.{path[2]}"]
    return [f"{names[path[0]]}.{path[1]}"]


def _in_layer(prefix: str, path: Path, experts: int) -> list[str]:
    if path[0] in ("attn_hc", "ffn_hc"):
        return [f"{prefix}.hc_{path[0].removesuffix('_hc')}_{path[1]}"]
    if path[:2] == ("ffn", "experts"):
        rest = ".".join(path[2:])
        return [f"{prefix}.ffn.experts.{e}.{rest}" for e in range(experts)]
    if path[-1] == "sink":
        return [f"{prefix}.attn.attn_sink"]
    module, leaf = _LAYER.get(path[:2]), path[2:]
    if module is None:
        return [f"{prefix}.{'.'.join(path)}"]
    return [f"{prefix}.{module}.{'.'.join(leaf)}"]
