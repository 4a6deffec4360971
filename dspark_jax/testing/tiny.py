"""Random models of a few thousand weights, for every architecture."""

from __future__ import annotations

from typing import Literal

import jax
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dspark_jax.config import AttentionConfig, DecoderConfig, RopeConfig
from dspark_jax.config_draft import DraftConfig, HeadKind
from dspark_jax.model import Model, make_model
from dspark_jax.models import dense
from dspark_jax.models.draft import backbone
from dspark_jax.models.params import for_cpu, random_params
from dspark_jax.spec import Spec
from dspark_jax.text import Tokenizer
from dspark_jax.text.token_bytes import BYTE_ALPHABET

# 256 bytes, one end token, padded to a multiple of eight.
EOS_ID, VOCAB = 256, 264


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and id 256 as the end of text."""
    vocab = {char: byte for byte, char in enumerate(BYTE_ALPHABET)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<eos>", special=True)])
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return Tokenizer(
        backend,
        eos_ids=(EOS_ID,),
        special_tokens={"eos_token": "<eos>"},
        chat_template=template,
    )


def tiny_config(
    architecture: Literal["llama", "qwen3", "gemma4"] = "qwen3",
    *,
    layers: int = 2,
    vocab_size: int = VOCAB,
    hidden_size: int = 32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    dtype: str = "float32",
    eos_ids: tuple[int, ...] = (),
) -> DecoderConfig:
    """A target config; Gemma4 alternates sliding and full layers."""
    head_dim = 8
    gemma = architecture == "gemma4"
    rope = RopeConfig(theta=1e6, kind="proportional", partial=0.5)
    full = AttentionConfig(
        num_kv_heads=1 if gemma else num_kv_heads,
        head_dim=2 * head_dim if gemma else head_dim,
        rope=rope if gemma else RopeConfig(),
        k_eq_v=gemma,
    )
    sliding = AttentionConfig(num_kv_heads, head_dim, window=6)
    pattern = ("sliding", "full") if gemma else ("full",)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_heads=num_heads,
        layer_types=tuple(pattern[i % len(pattern)] for i in range(layers)),
        full=full,
        sliding=sliding if gemma else None,
        tie_embeddings=gemma,
        logit_softcap=30.0 if gemma else None,
        max_position=512,
        eos_ids=eos_ids,
        dtype=dtype,
    )


def tiny_draft_config(
    target: DecoderConfig,
    *,
    gamma: int = 4,
    head: HeadKind = "vanilla",
    layers: int = 1,
    sample_from_anchor: bool = True,
    draft_vocab_size: int | None = None,
    window: int | None = None,
) -> DraftConfig:
    """A draft config for `target`, tapping the embedding and the first layer."""
    geometry = target.attention("full")
    kind = "sliding" if window else "full"
    drafted = AttentionConfig(
        geometry.num_kv_heads, geometry.head_dim, geometry.rope, window, geometry.k_eq_v
    )
    base = DecoderConfig(
        architecture="gemma4" if target.architecture == "gemma4" else "qwen3",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        layer_types=(kind,) * layers,
        full=None if window else drafted,
        sliding=drafted if window else None,
        logit_softcap=target.logit_softcap,
        max_position=target.max_position,
        valid_vocab=target.valid_vocab,
        dtype=target.dtype,
    )
    return DraftConfig(
        backbone=base,
        block_size=gamma if sample_from_anchor else gamma + 1,
        target_layer_ids=(-1, 0) if target.num_layers > 1 else (-1,),
        num_target_layers=target.num_layers,
        mask_token_id=target.vocab_size - 1,
        sample_from_anchor=sample_from_anchor,
        markov_rank=0 if head == "none" else 8,
        markov_head=head,
        confidence=True,
        confidence_with_markov=head != "none",
        draft_vocab_size=draft_vocab_size,
    )


def tiny_model(
    architecture: Literal["llama", "qwen3", "gemma4"] = "qwen3",
    *,
    seed: int = 0,
    scale: float = 3.0,
    target: DecoderConfig | None = None,
    draft: DraftConfig | None = None,
    stacked: bool = False,
) -> Model:
    """A random target with a random draft.

    Args:
      architecture: of the target, unless `target` is given.
      seed: of the weights.
      scale: of the weights; larger makes greedy text less repetitive.
      target: config; default `tiny_config(architecture)`.
      draft: config; default `tiny_draft_config(target)`.
      stacked: keep layers stacked and compute them as a scan.
    """
    target = target or tiny_config(architecture)
    draft = draft or tiny_draft_config(target)
    first, second = jax.random.split(jax.random.key(seed))
    shapes = dict(backbone.abstract_draft_params(draft))
    reduced = shapes.pop("d2t", None)
    params = {
        "target": random_params(dense.abstract_params(target), first, scale),
        "draft": random_params(shapes, second, scale),
    }
    if reduced is not None:
        order = jax.random.permutation(second, target.valid_vocab or target.vocab_size)
        params["draft"]["d2t"] = order[: reduced.shape[0]].astype(reduced.dtype)
    if not stacked:
        params = {name: for_cpu(tree) for name, tree in params.items()}
    tokenizer = byte_tokenizer() if target.vocab_size >= VOCAB else None
    return make_model(Spec(target, draft), params, tokenizer, f"tiny-{architecture}")
