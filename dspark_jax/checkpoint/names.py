"""Published tensor names and the parameters they fill.

One table a format says how a module is called there; which modules and layers
exist, and their shapes, comes from the declared parameters of the config.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping

import jax

from dspark_jax.config import DecoderConfig
from dspark_jax.config_draft import DraftConfig, TargetConfig
from dspark_jax.errors import CheckpointError
from dspark_jax.models import family
from dspark_jax.models.params import flatten

Path = tuple[str, ...]
Shapes = dict[Path, jax.ShapeDtypeStruct]

# Longest first: one prefix may begin another.
PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
    "",
)
# Parts of multimodal checkpoints that text never reads, tables that old files
# store although they are computed, and the verifier's own norm and head that a
# draft may have been trained with.
IGNORED = re.compile(
    r"^(model\.)?(vision_tower|vision_model|audio_tower|embed_vision|embed_audio"
    r"|multi_modal_projector)\."
    r"|rotary_emb\.inv_freq$"
    r"|^verifier_(norm|lm_head)\.weight$"
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one format names modules.

    Attributes:
      top: name of each module outside the layers, by its path here.
      layer: name of each module of a layer.
      prefix: what comes before a layer's module, with `{layer}`.
      bare: names here whose tensor has no `.weight` there.
    """

    top: Mapping[Path, str]
    layer: Mapping[str, str]
    prefix: str
    bare: frozenset[str] = frozenset()

    def name(self, path: Path, layer: int | None) -> str:
        """Published name of a parameter, or of one layer of a stacked one."""
        module, leaf = path[:-1], path[-1]
        if layer is None:
            top = self.top.get(module)
            return f"{top}.{leaf}" if top else ".".join(path)
        known = self.layer.get(module[-1])
        if known is None:
            raise CheckpointError(f"this format has no place for {'.'.join(path)}")
        base = self.prefix.format(layer=layer) + known
        return base if module[-1] in self.bare else f"{base}.{leaf}"


_HF_LAYER = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_feedforward_norm": "pre_feedforward_layernorm",
    "post_feedforward_norm": "post_feedforward_layernorm",
    "layer_scalar": "layer_scalar",
    **{
        name: f"self_attn.{name}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    },
    **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
}
HF = Layout(
    top={
        ("embed",): "embed_tokens",
        ("norm",): "norm",
        ("lm_head",): "lm_head",
        ("fc",): "fc",
        ("hidden_norm",): "hidden_norm",
        ("markov", "w1"): "markov_head.markov_w1",
        ("markov", "w2"): "markov_head.markov_w2",
        ("markov", "gate"): "markov_head.gate_proj",
        ("markov", "joint"): "markov_head.joint_proj",
        ("confidence",): "confidence_head.proj",
    },
    layer=_HF_LAYER,
    prefix="layers.{layer}.",
    bare=frozenset({"layer_scalar"}),
)
GGUF = Layout(
    top={("embed",): "token_embd", ("norm",): "output_norm", ("lm_head",): "output"},
    layer={
        "input_norm": "attn_norm",
        "post_attention_norm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    },
    prefix="blk.{layer}.",
)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a tensor goes: a parameter, and the index in it when stacked."""

    path: Path
    index: int | None
    shape: tuple[int, ...]


def declared_shapes(config: TargetConfig | DraftConfig) -> Shapes:
    """Shape and dtype of every parameter, by path."""
    if isinstance(config, DraftConfig):
        return flatten(family.draft_of(config).abstract_draft_params(config))
    return flatten(family.target_of(config).abstract_params(config))


def expected(
    config: DecoderConfig | DraftConfig, shapes: Shapes, layout: Layout
) -> dict[str, Slot]:
    """Every published tensor that the parameters need, by name."""
    backbone = config.backbone if isinstance(config, DraftConfig) else config
    assert isinstance(backbone, DecoderConfig)
    slots: dict[str, Slot] = {}
    for path, leaf in shapes.items():
        if path[0] != "layers":
            slots[layout.name(path, None)] = Slot(path, None, leaf.shape)
            continue
        for layer in range(backbone.num_layers):
            kind, index = backbone.layer_slot(layer)
            if kind == path[1]:
                name = layout.name(path, layer)
                slots[name] = Slot(path, index, leaf.shape[1:])
    return slots


def strip_prefix(names: Iterable[str]) -> dict[str, str]:
    """Names without the prefix of their format -> names in the files."""
    names = list(names)
    prefix = next(
        (p for p in PREFIXES if any(n.startswith(f"{p}layers.") for n in names)), ""
    )
    result: dict[str, str] = {}
    for name in names:
        short = name.removeprefix(prefix) if name.startswith(prefix) else name
        if short == name and prefix:
            # The head of a multimodal model lies beside the text model.
            short = name.removeprefix("language_model.")
        if short in result:
            raise CheckpointError(f"{result[short]} and {name} are the same parameter")
        result[short] = name
    return result


def check_names(
    slots: Mapping[str, Slot],
    found: Mapping[str, tuple[int, ...]],
    allowed: Iterable[str] = (),
) -> None:
    """Compares the tensors of a file with those that are needed.

    Args:
      slots: the needed ones.
      found: shape of each stored tensor, by name without prefix.
      allowed: further names that may be there.

    Raises:
      CheckpointError: one message with the number of missing, unknown and
        misshapen tensors and up to five names of each.
    """
    allowed = set(allowed)
    missing = [name for name in slots if name not in found]
    unknown = [
        name
        for name in found
        if name not in slots and name not in allowed and not IGNORED.search(name)
    ]
    misshapen = [
        f"{name} {tuple(found[name])} instead of {tuple(slot.shape)}"
        for name, slot in slots.items()
        if name in found and tuple(found[name]) != tuple(slot.shape)
    ]
    if not (missing or unknown or misshapen):
        return
    hints = [f"{name}{_closest(name, slots)}" for name in unknown[:5]]
    raise CheckpointError(
        "tensors do not match the config: "
        f"{len(missing)} missing{_listing(missing)}; "
        f"{len(unknown)} unknown{_listing(hints, len(unknown))}; "
        f"{len(misshapen)} of the wrong shape{_listing(misshapen)}"
    )


def _listing(names: list[str], total: int | None = None) -> str:
    if not names:
        return ""
    more = ", ..." if (total or len(names)) > 5 else ""
    return f" ({', '.join(names[:5])}{more})"


def _closest(name: str, slots: Mapping[str, Slot]) -> str:
    patterns = {re.sub(r"\.\d+\.", ".N.", known) for known in slots}
    wanted = re.sub(r"\.\d+\.", ".N.", name)
    # The longest common tail tells more than a ratio when only a prefix differs.
    tails = [p for p in patterns if wanted.endswith("." + p)]
    close = tails or difflib.get_close_matches(wanted, sorted(patterns), 1, 0.5)
    return f" [closest known: {max(close, key=len)}]" if close else ""
