"""Settings of drafts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from dspark_jax.config import DecoderConfig, decoder_from_json, require
from dspark_jax.config_v4 import V4Config, v4_from_json

TargetConfig = DecoderConfig | V4Config
HeadKind = Literal["none", "vanilla", "gated", "rnn"]


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """A DSpark (or, with rank 0, DFlash) draft for one target.

    `backbone` has the draft's own depth and geometry and the target's vocabulary; a
    `V4Config` there makes it the stages of a DeepSeek-V4 draft. `target_layer_ids` are
    the tapped target layers; id l means the output of layer l and -1 the embedding.
    `block_size` counts block inputs; with `sample_from_anchor` the anchor row predicts
    too, otherwise row 0 is dropped (DSpark paper, section 3; DFlash).

    `confidence_temperatures` are the result of a calibration, one number for each
    drafted position, and `confidence_shifts` as many more if shifts were fitted (None:
    0): the chance that draft k stands is sigmoid((logit_k + b_k) / T_k). They
    hold for one sampling temperature, which is kept beside them in `calibrated_at`
    (0 is greedy). Weights and drafted tokens do not depend on them. A config is a
    static argument of jit: other temperatures or shifts compile programs anew.

    `usual_length` is how many drafts a round has where nothing else is asked for, the
    fastest where the draft was measured; None is gamma.
    """

    backbone: TargetConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    sample_from_anchor: bool = True
    markov_rank: int = 0
    markov_head: HeadKind = "none"
    confidence: bool = False
    confidence_with_markov: bool = False
    draft_vocab_size: int | None = None
    # False: the target's arrays serve (they are frozen copies in training).
    own_embed: bool = False
    own_head: bool = False
    confidence_temperatures: tuple[float, ...] | None = None
    calibrated_at: float | None = None
    usual_length: int | None = None
    confidence_shifts: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        smallest = 1 if self.sample_from_anchor else 2
        require(
            self.block_size >= smallest,
            "block_size",
            self.block_size,
            f">= {smallest}",
        )
        heads = ("none", "vanilla", "gated", "rnn")
        require(
            self.markov_head in heads, "markov_head", self.markov_head, ", ".join(heads)
        )
        require(
            (self.markov_rank > 0) == (self.markov_head != "none"),
            "markov_rank",
            self.markov_rank,
            f"> 0 exactly when there is a Markov head (here {self.markov_head!r})",
        )
        require(
            not self.confidence_with_markov
            or (self.confidence and self.markov_rank > 0),
            "confidence_with_markov",
            self.confidence_with_markov,
            "False without a confidence head or with markov_rank 0",
        )
        ids = self.target_layer_ids
        last = self.last_tap(self.num_target_layers)
        increasing = all(a < b for a, b in zip(ids, ids[1:], strict=False))
        require(
            bool(ids) and increasing and ids[0] >= -1 and ids[-1] <= last,
            "target_layer_ids",
            ids,
            f"strictly increasing in -1..{last}",
        )
        vocab = self.backbone.vocab_size
        require(
            0 <= self.mask_token_id < vocab,
            "mask_token_id",
            self.mask_token_id,
            f"0..{vocab - 1}",
        )
        reduced = self.draft_vocab_size
        require(
            reduced is None or 0 < reduced <= vocab,
            "draft_vocab_size",
            reduced,
            f"1..{vocab} or None",
        )
        usual = self.usual_length
        require(
            usual is None or (type(usual) is int and 1 <= usual <= self.gamma),
            "usual_length",
            usual,
            f"1..{self.gamma} or None",
        )
        self._check_calibration()

    def _check_calibration(self) -> None:
        found, at = self.confidence_temperatures, self.calibrated_at
        shifts = self.confidence_shifts
        require(
            (found is None) == (at is None),
            "calibrated_at",
            at,
            "the sampling temperature of the fit where there are "
            "`confidence_temperatures`, else None",
        )
        require(
            shifts is None or found is not None,
            "confidence_shifts",
            shifts,
            "None without `confidence_temperatures`",
        )
        if found is None or at is None:
            return
        require(
            self.confidence,
            "confidence_temperatures",
            found,
            "None without a confidence head",
        )
        require(
            isinstance(found, tuple)
            and len(found) == self.gamma
            and all(_is_finite(t) and t > 0 for t in found),
            "confidence_temperatures",
            found,
            f"None or a tuple of {self.gamma} finite numbers > 0, one a position",
        )
        require(
            shifts is None
            or (
                isinstance(shifts, tuple)
                and len(shifts) == self.gamma
                and all(map(_is_finite, shifts))
            ),
            "confidence_shifts",
            shifts,
            f"None or a tuple of {self.gamma} finite numbers, one a position",
        )
        require(_is_finite(at) and at >= 0, "calibrated_at", at, "a finite number >= 0")

    def last_tap(self, depth: int) -> int:
        """The last layer of a target of `depth` layers that may be tapped."""
        # Dense reference models store their last layer's output behind the final norm.
        return depth - 1 - isinstance(self.backbone, DecoderConfig)

    @property
    def gamma(self) -> int:
        """Drafted tokens per round."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def head_rows(self) -> int:
        """Rows of the draft's output head: V, or the reduced vocabulary."""
        return self.draft_vocab_size or self.backbone.vocab_size


def _is_finite(x: object) -> bool:
    if isinstance(x, bool) or not isinstance(x, int | float):
        return False
    return math.isfinite(x)


def dense_config(target: TargetConfig, what: str) -> DecoderConfig:
    """The settings of a dense target; ValueError for others.

    `what` says what wants one.
    """
    if isinstance(target, DecoderConfig):
        return target
    raise ValueError(
        f"{what} is for dense targets, this one is a {target.architecture} model"
    )


def target_from_json(data: dict[str, Any]) -> TargetConfig:
    """Inverse of `config.to_json` for a target of either family."""
    # Files from before there were two families are of dense models.
    dense = "compress_ratios" not in data
    return decoder_from_json(data) if dense else v4_from_json(data)


def draft_from_json(data: dict[str, Any]) -> DraftConfig:
    """Inverse of `to_json` for a `DraftConfig`.

    Files from before drafts were calibrated lack those fields; None then. So do
    those from before there were shifts.
    """
    by_position = ("confidence_temperatures", "confidence_shifts")
    found = {name: data.get(name) for name in by_position}
    return DraftConfig(
        **{
            **data,
            "backbone": target_from_json(data["backbone"]),
            "target_layer_ids": tuple(data["target_layer_ids"]),
            **{name: x if x is None else tuple(x) for name, x in found.items()},
        }
    )
