"""Settings of a training run: the draft's shape, its supervision, the optimiser."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Literal

from dspark_jax.config import AttentionConfig, DecoderConfig, require
from dspark_jax.config_draft import DraftConfig, HeadKind
from dspark_jax.training.losses import LossConfig


@dataclasses.dataclass(frozen=True)
class DraftShape:
    """How a draft is cut to its target; what is None follows the target.

    Attributes:
      layers: depth.
      block_size: gamma, drafts a round; the anchor row predicts.
      taps: target layers that are read; None: five, evenly spaced from the second
        one to the third from the end, as the published drafts have them.
      num_heads: query heads of the draft's attention.
      num_kv_heads: key/value heads. A context row passes through keys and values
        only, so few of them make a narrow gate.
      markov_head: "none", "vanilla", "gated" or "rnn".
      markov_rank: r; 0 exactly for "none".
      confidence: whether there is a confidence head.
      vocab_size: rows of the draft's vocabulary, the ids the target wrote most
        often; None: all.
      mask_token_id: fills block rows behind the anchor; None: the last id.
    """

    layers: int = 5
    block_size: int = 7
    taps: tuple[int, ...] | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    markov_head: HeadKind = "vanilla"
    markov_rank: int = 256
    confidence: bool = True
    vocab_size: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        require(self.layers >= 1, "layers", self.layers, ">= 1")


def default_taps(layers: int) -> tuple[int, ...]:
    """Up to five ids from 1 to `layers - 3`, evenly spaced."""
    last = max(layers - 3, 0)
    first = min(1, last)
    ids = (first + round(i * (last - first) / 4) for i in range(5))
    return tuple(sorted(set(ids)))


def draft_config(target: DecoderConfig, shape: DraftShape) -> DraftConfig:
    """The draft: layers with q/k norms and the target's sizes (DSpark, section 3).

    Raises:
      ValueError: a shape that does not fit the target.
    """
    full = target.attention("full" if target.full else "sliding")
    heads = shape.num_heads or target.num_heads
    kv_heads = shape.num_kv_heads or full.num_kv_heads
    require(
        heads % kv_heads == 0, "num_kv_heads", kv_heads, f"a divisor of {heads} heads"
    )
    backbone = dataclasses.replace(
        target,
        architecture="gemma4" if target.architecture == "gemma4" else "qwen3",
        num_heads=heads,
        layer_types=("full",) * shape.layers,
        full=AttentionConfig(kv_heads, full.head_dim, full.rope, k_eq_v=full.k_eq_v),
        sliding=None,
        tie_embeddings=False,
    )
    mask = shape.mask_token_id
    return DraftConfig(
        backbone=backbone,
        block_size=shape.block_size,
        target_layer_ids=shape.taps or default_taps(target.num_layers),
        num_target_layers=target.num_layers,
        mask_token_id=target.vocab_size - 1 if mask is None else mask,
        markov_rank=shape.markov_rank,
        markov_head=shape.markov_head,
        confidence=shape.confidence,
        confidence_with_markov=shape.confidence and shape.markov_rank > 0,
        draft_vocab_size=shape.vocab_size,
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run; with the text and the target it fixes every bit of it.

    Attributes:
      draft: its shape.
      loss: weights of the terms.
      steps: optimiser steps. The one field that a resumed run may change.
      sequences: of a step's batch.
      anchors: of each sequence.
      rate: peak learning rate.
      warmup: steps of linear warm-up.
      schedule: "cosine" falls to 0 over all steps; "constant" stays at the peak
        until the last `cooldown` steps and falls linearly to 0 there, so that a run
        can be made longer before they begin.
      cooldown: see `schedule`.
      ce_start: weight of the cross-entropy at first; it falls linearly to
        `loss.ce` over `ce_steps` steps. The gradient of L1 vanishes where the draft
        has no mass yet.
      ce_steps: see `ce_start`; 0 starts at `loss.ce`.
      soft_labels: cross-entropy against the target's law instead of the token that
        was drawn from it: the same mean, less noise.
      top: likeliest ids of the target kept as supervision of a position, the rest
        of its law counting as missing; 0 keeps the target's last hidden row, from
        which the whole law is computed.
      start: "random", or "target": layers copied from the target's last ones.
      bigram_steps: steps that train the Markov head on bigrams of the text before
        anything else; 0 leaves them out.
      average: decay of the running average of the weights, which is what is
        exported; 0 exports the weights themselves.
      clip: of the gradient's global norm.
      beta2: of Adam.
      weight_decay: decoupled.
      dtype: of matrices in the forward; weights and moments are float32.
      seed: of initial values, order and anchors.
    """

    draft: DraftShape = DraftShape()
    loss: LossConfig = LossConfig()
    steps: int = 10000
    sequences: int = 8
    anchors: int = 64
    rate: float = 6e-4
    warmup: int = 400
    schedule: Literal["cosine", "constant"] = "cosine"
    cooldown: int = 0
    ce_start: float = 0.1
    ce_steps: int = 0
    soft_labels: bool = False
    top: int = 0
    start: Literal["random", "target"] = "random"
    bigram_steps: int = 0
    average: float = 0.0
    clip: float = 1.0
    beta2: float = 0.999
    weight_decay: float = 0.0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "sequences", "anchors"):
            require(getattr(self, name) >= 1, name, getattr(self, name), ">= 1")
        for name in ("warmup", "cooldown", "ce_steps", "top", "bigram_steps"):
            require(getattr(self, name) >= 0, name, getattr(self, name), ">= 0")
        require(self.rate > 0, "rate", self.rate, "> 0")
        require(0 <= self.average < 1, "average", self.average, "[0, 1)")
        for name, allowed in (
            ("schedule", ("cosine", "constant")),
            ("start", ("random", "target")),
            ("dtype", ("bfloat16", "float32")),
        ):
            value = getattr(self, name)
            require(value in allowed, name, value, ", ".join(allowed))
        require(self.clip > 0, "clip", self.clip, "> 0")
        require(
            self.bigram_steps == 0 or self.draft.markov_head == "vanilla",
            "bigram_steps",
            self.bigram_steps,
            "0 unless the Markov head is vanilla",
        )

    def for_steps(self) -> TrainConfig:
        """Without what only the host reads: what a step is compiled for."""
        plain = TrainConfig()
        names = (
            "steps", "sequences", "anchors", "rate", "warmup", "schedule", "cooldown",
            "ce_start", "ce_steps", "start", "bigram_steps", "seed",
        )  # fmt: skip
        return dataclasses.replace(self, **{n: getattr(plain, n) for n in names})

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


def config_from_json(data: dict[str, Any]) -> TrainConfig:
    """Inverse of `TrainConfig.to_json`; fields left out keep their defaults.

    Raises:
      ValueError: an unknown field, by name.
    """
    draft = dict(data.get("draft", {}))
    if draft.get("taps") is not None:
        draft["taps"] = tuple(draft["taps"])
    plain = {k: v for k, v in data.items() if k not in ("draft", "loss")}
    return TrainConfig(
        draft=_made(DraftShape, draft, "draft"),
        loss=_made(LossConfig, data.get("loss", {}), "loss"),
        **_known(TrainConfig, plain, "the recipe"),
    )


def read_recipe(path: str | Path) -> TrainConfig:
    """Settings from a TOML file with the field names of `TrainConfig`.

    Raises:
      ValueError: no such file, no TOML, or unknown fields.
    """
    try:
        return config_from_json(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _known(kind: type, data: dict[str, Any], where: str) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(data) - set(names))
    if unknown:
        raise ValueError(
            f"{where} has unknown fields {', '.join(unknown)}; known: "
            f"{', '.join(names)}"
        )
    return data


def _made(kind: type, data: dict[str, Any], where: str) -> Any:
    return kind(**_known(kind, data, where))
