"""Settings of DeepSeek-V4 targets, and of the stages of their drafts."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from dspark_jax.config import DTYPES, RopeConfig, require

# How a layer sees what lies behind its window: not at all (0), through entries of 4
# positions that an indexer selects, or through all entries of many positions.
SELECTED_RATIO = 4
Weights = Literal["float", "fp8_fp4"]


@dataclasses.dataclass(frozen=True)
class V4Config:
    """A DeepSeek-V4 text model, or the stages of a draft for one.

    `compress_ratios` has one entry a layer: 0 sees the sliding window only, 4 also
    overlapping compressed entries that an indexer selects (CSA), any larger number r
    all entries of r positions (HCA). The first `num_hash_layers` layers choose experts
    by token id, the others by score. `rope` serves layers of ratio 0, `compress_rope`
    the others.

    `weights` says how matrices lie in memory: "float" in `dtype`, "fp8_fp4" as
    published, 8-bit floats with a scale for each block of 128x128 and experts as 4-bit
    floats with a scale for each 32 inputs. `round_activations` rounds window keys,
    compressed entries and the indexer's inputs as the published engine does.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    compress_ratios: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    num_experts: int
    experts_per_token: int
    moe_dim: int
    num_hash_layers: int
    route_scale: float
    swiglu_limit: float
    rope: RopeConfig = RopeConfig()
    compress_rope: RopeConfig = RopeConfig(
        theta=160000.0,
        kind="yarn",
        factor=16.0,
        original_max_position=65536,
        attention_factor=1.0,
    )
    streams: int = 4
    sinkhorn_iterations: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    max_position: int = 1048576
    eos_ids: tuple[int, ...] = ()
    valid_vocab: int | None = None
    dtype: str = "float32"
    weights: Weights = "float"
    round_activations: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and field.name != "num_hash_layers":
                require(type(value) is int and value > 0, field.name, value, "int > 0")
        require(self.dtype in DTYPES, "dtype", self.dtype, ", ".join(DTYPES))
        kinds = ("float", "fp8_fp4")
        require(self.weights in kinds, "weights", self.weights, ", ".join(kinds))
        require(
            0 < self.rope_dim < self.head_dim and self.rope_dim % 2 == 0,
            "rope_dim",
            self.rope_dim,
            f"even, 2..{self.head_dim - 1}",
        )
        require(
            self.rope_dim <= self.index_dim,
            "index_dim",
            self.index_dim,
            f">= {self.rope_dim}, the rotated channels",
        )
        require(
            self.num_heads % self.o_groups == 0,
            "o_groups",
            self.o_groups,
            f"a divisor of {self.num_heads} heads",
        )
        require(
            self.experts_per_token <= self.num_experts,
            "experts_per_token",
            self.experts_per_token,
            f"1..{self.num_experts}",
        )
        require(
            0 <= self.num_hash_layers <= self.num_layers,
            "num_hash_layers",
            self.num_hash_layers,
            f"0..{self.num_layers}",
        )
        odd = [r for r in self.compress_ratios if r != 0 and r < SELECTED_RATIO]
        require(
            not odd and bool(self.compress_ratios),
            "compress_ratios",
            self.compress_ratios,
            "0 (window only), 4 (selected entries) or more (all entries), one a layer",
        )
        valid = self.valid_vocab
        require(
            valid is None or 0 < valid <= self.vocab_size,
            "valid_vocab",
            valid,
            f"1..{self.vocab_size} or None",
        )

    @property
    def architecture(self) -> str:
        """Name of the family."""
        return "deepseek_v4"

    @property
    def num_layers(self) -> int:
        """Depth."""
        return len(self.compress_ratios)

    def rope_of(self, ratio: int) -> RopeConfig:
        """The rotary embedding of a layer."""
        return self.compress_rope if ratio else self.rope

    def entry_rows(self, ratio: int) -> int:
        """Positions that one compressed entry is made from."""
        return 2 * ratio if ratio == SELECTED_RATIO else ratio


def v4_from_json(data: dict[str, Any]) -> V4Config:
    """Inverse of `config.to_json` for a `V4Config`."""
    return V4Config(
        **{
            **data,
            "rope": RopeConfig(**data["rope"]),
            "compress_rope": RopeConfig(**data["compress_rope"]),
            "compress_ratios": tuple(data["compress_ratios"]),
            "eos_ids": tuple(data["eos_ids"]),
        }
    )
