"""Frozen, hashable settings: what a model is.

Every class validates itself when it is made, so that code further in never
re-checks. Shapes and letters follow the design notes: `H` hidden size, `V`
vocabulary, `gamma` drafted tokens per round.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

LayerKind = Literal["full", "sliding"]
RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional"]

DTYPES = ("float32", "bfloat16", "float16")


def require(ok: bool, field: str, value: object, allowed: str) -> None:
    """Raises ValueError naming the field, the value and what is allowed."""
    if not ok:
        raise ValueError(f"`{field}` is {value!r}; allowed: {allowed}")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one attention kind.

    `kind` names the frequency rule. `factor` stretches positions (`linear`,
    `llama3`, `yarn`); `partial` is the rotated share of the head in the
    `proportional` rule; the other fields belong to the rule of their name.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    partial: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # Multiplies cos and sin (yarn). None: 0.1 ln(factor) + 1.
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        kinds = ("default", "linear", "llama3", "yarn", "proportional")
        require(self.kind in kinds, "rope kind", self.kind, ", ".join(kinds))
        require(self.theta > 0, "rope theta", self.theta, "> 0")
        require(self.factor >= 1, "rope factor", self.factor, ">= 1")
        require(0 < self.partial <= 1, "rope partial", self.partial, "(0, 1]")
        needs_original = self.kind in ("llama3", "yarn")
        require(
            not needs_original or self.original_max_position > 0,
            "original_max_position",
            self.original_max_position,
            f"> 0 for {self.kind} scaling",
        )


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Geometry of one attention kind.

    `window` counts visible positions including the query's own; None is
    unlimited. With `k_eq_v` there is no value projection: values are the raw
    keys, normalised without a gain.
    """

    num_kv_heads: int
    head_dim: int
    rope: RopeConfig = RopeConfig()
    window: int | None = None
    k_eq_v: bool = False

    def __post_init__(self) -> None:
        require(self.num_kv_heads > 0, "num_kv_heads", self.num_kv_heads, "> 0")
        require(
            self.head_dim > 0 and self.head_dim % 2 == 0,
            "head_dim",
            self.head_dim,
            "even and > 0",
        )
        require(
            self.window is None or self.window > 0, "window", self.window, "> 0 or None"
        )


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A dense decoder: Llama, Qwen3 or Gemma4 text, or a draft's backbone.

    `layer_types` names the attention kind of each layer; `full` and `sliding`
    hold the geometry of the kinds that occur. `vocab_size` counts rows of the
    embedding, `valid_vocab` the ids that may be emitted (padding rows above it
    are masked; None: all of them).
    """

    architecture: Literal["llama", "qwen3", "gemma4"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layer_types: tuple[LayerKind, ...]
    full: AttentionConfig | None = None
    sliding: AttentionConfig | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    logit_softcap: float | None = None
    max_position: int = 2048
    eos_ids: tuple[int, ...] = ()
    valid_vocab: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        names = ("llama", "qwen3", "gemma4")
        require(
            self.architecture in names,
            "architecture",
            self.architecture,
            ", ".join(names),
        )
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_heads"):
            value = getattr(self, field)
            require(isinstance(value, int) and value > 0, field, value, "int > 0")
        require(self.dtype in DTYPES, "dtype", self.dtype, ", ".join(DTYPES))
        for kind in set(self.layer_types):
            require(kind in ("full", "sliding"), "layer type", kind, "full, sliding")
            attention = self.attention(kind)
            require(
                self.num_heads % attention.num_kv_heads == 0,
                "num_heads",
                self.num_heads,
                f"a multiple of {attention.num_kv_heads} key/value heads",
            )
        valid = self.valid_vocab
        require(
            valid is None or 0 < valid <= self.vocab_size,
            "valid_vocab",
            valid,
            f"1..{self.vocab_size} or None",
        )

    @property
    def num_layers(self) -> int:
        """Depth."""
        return len(self.layer_types)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Attention kinds that occur, in a fixed order."""
        order: tuple[LayerKind, ...] = ("full", "sliding")
        return tuple(kind for kind in order if kind in self.layer_types)

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed per head."""
        return self.architecture in ("qwen3", "gemma4")

    def attention(self, kind: LayerKind) -> AttentionConfig:
        """Geometry of `kind`; ValueError when the config has none."""
        found = self.full if kind == "full" else self.sliding
        if found is None:
            raise ValueError(f"`layer_types` uses {kind!r} but `{kind}` is None")
        return found

    def layer_slot(self, layer: int) -> tuple[LayerKind, int]:
        """Where layer `layer` lies in the stacked parameters: kind and index."""
        kind = self.layer_types[layer]
        return kind, self.layer_types[:layer].count(kind)


def to_json(config: Any) -> dict[str, Any]:
    """`config` as JSON-ready nested dicts and lists."""
    return dataclasses.asdict(config)


def _attention_from(data: dict[str, Any] | None) -> AttentionConfig | None:
    if data is None:
        return None
    return AttentionConfig(**{**data, "rope": RopeConfig(**data["rope"])})


def decoder_from_json(data: dict[str, Any]) -> DecoderConfig:
    """Inverse of `to_json` for a `DecoderConfig`."""
    return DecoderConfig(
        **{
            **data,
            "layer_types": tuple(data["layer_types"]),
            "eos_ids": tuple(data["eos_ids"]),
            "full": _attention_from(data["full"]),
            "sliding": _attention_from(data["sliding"]),
        }
    )
