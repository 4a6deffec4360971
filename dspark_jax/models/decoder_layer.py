"""One decoder layer: Llama, Qwen3 and Gemma4 text, targets and drafts alike."""

from __future__ import annotations

import dataclasses
import functools

import jax
from flax import nnx

from dspark_jax.config import DecoderConfig, LayerKind
from dspark_jax.models import attention
from dspark_jax.models.layers import (
    Linear,
    Norm,
    Scalar,
    rms_normalise,
    rope_tables,
    rotate,
)
from dspark_jax.models.rows import Rows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "cos", "sin", "layout"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class BlockView:
    """What every layer of one attention kind shares in a step.

    Attributes:
      rows: the flat rows.
      cos: float32[B, T, d / 2]. Rotary tables of the block.
      sin: as cos.
      layout: what each row sees; None when the rows attend to nothing.
    """

    rows: Rows
    cos: jax.Array
    sin: jax.Array
    layout: attention.Layout | None


def block_view(
    config: DecoderConfig,
    kind: LayerKind,
    rows: Rows,
    capacity: int | None,
    causal: bool = True,
) -> BlockView:
    """The view of `rows` for one attention kind.

    Args:
      config: the decoder.
      kind: which geometry.
      rows: the flat rows.
      capacity: of the cache; None for rows that only give keys and values.
      causal: False lets every row see its whole block.
    """
    geometry = config.attention(kind)
    cos, sin = rope_tables(geometry.rope, geometry.head_dim, rows.block_positions())
    at = None
    if capacity is not None:
        at = attention.layout(
            rows.start,
            rows.width,
            attention.slots_for(capacity),
            attention.tile_size(capacity),
            geometry.window,
            causal,
        )
    # Without the barrier XLA would compute them again inside every layer.
    return BlockView(rows, *jax.lax.optimization_barrier((cos, sin, at)))


class DecoderLayer(nnx.Module):
    """Attention and gated MLP with the norms of the architecture.

    Llama and Qwen3 are pre-norm. Gemma4 norms the input and the output of each
    sublayer and scales the stream at the end; its values are normalised
    without a gain and its scores are not scaled.
    """

    def __init__(self, config: DecoderConfig, kind: LayerKind):
        """Declares the layer's parameters."""
        geometry = config.attention(kind)
        hidden, inner, dtype = (
            config.hidden_size,
            config.intermediate_size,
            config.dtype,
        )
        d, bias, eps = geometry.head_dim, config.attention_bias, config.rms_norm_eps
        q_dim, kv_dim = config.num_heads * d, geometry.num_kv_heads * d
        gemma = config.architecture == "gemma4"

        self.head_dim, self.eps, self.gemma = d, eps, gemma
        self.scale = 1.0 if gemma else d**-0.5
        self.input_norm = Norm(hidden, eps, dtype)
        self.q_proj = Linear(q_dim, hidden, ("heads", "embed"), dtype, bias)
        self.k_proj = Linear(kv_dim, hidden, ("kv_heads", "embed"), dtype, bias)
        self.v_proj = (
            None
            if geometry.k_eq_v
            else Linear(kv_dim, hidden, ("kv_heads", "embed"), dtype, bias)
        )
        self.o_proj = Linear(hidden, q_dim, ("embed", "heads"), dtype, bias)
        self.q_norm = Norm(d, eps, dtype) if config.qk_norm else None
        self.k_norm = Norm(d, eps, dtype) if config.qk_norm else None
        self.post_attention_norm = Norm(hidden, eps, dtype)
        mlp_bias = config.mlp_bias
        self.gate_proj = Linear(inner, hidden, ("mlp", "embed"), dtype, mlp_bias)
        self.up_proj = Linear(inner, hidden, ("mlp", "embed"), dtype, mlp_bias)
        self.down_proj = Linear(hidden, inner, ("embed", "mlp"), dtype, mlp_bias)
        if gemma:
            self.pre_feedforward_norm = Norm(hidden, eps, dtype)
            self.post_feedforward_norm = Norm(hidden, eps, dtype)
            self.layer_scalar = Scalar(dtype)

    def __call__(
        self, x: jax.Array, view: BlockView, cache_k: jax.Array, cache_v: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Evaluates the rows against the cache; the cache is only read.

        Args:
          x: float32[G, H].
          view: shared by the layers of this kind.
          cache_k: [B, K, C, d].
          cache_v: [B, K, C, d].

        Returns:
          (x float32[G, H], keys float32[B, K, T, d], values likewise).
        """
        h = self.input_norm(x)
        q = self._heads(self.q_proj(h))
        if self.q_norm is not None:
            q = self.q_norm(q)
        q = rotate(view.rows.pad(q), view.cos[:, :, None], view.sin[:, :, None])
        k, v = self._block_kv(h, view)
        assert view.layout is not None, "a view without a cache only gives keys"
        mixed = attention.block_attention(
            q, k, v, cache_k, cache_v, view.layout, self.scale
        )
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        out = self.o_proj(view.rows.flat(mixed))
        if self.gemma:
            out = self.post_attention_norm(out)
        return self.mlp_sublayer(x + out), k, v

    def context_kv(self, context: jax.Array, view: BlockView):
        """Keys and values of context rows, which skip the input norm.

        Args:
          context: float32[G, H]. Draft context after `fc` and its norm.
          view: rows and rotary tables of the context positions.

        Returns:
          (keys float32[B, K, T, d], values likewise).
        """
        return self._block_kv(context, view)

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, self.head_dim)

    def _block_kv(self, h: jax.Array, view: BlockView) -> tuple[jax.Array, jax.Array]:
        k = self._heads(self.k_proj(h))
        v = k if self.v_proj is None else self._heads(self.v_proj(h))
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.gemma:
            v = rms_normalise(v, self.eps)
        k = rotate(view.rows.pad(k), view.cos[:, :, None], view.sin[:, :, None])
        return k.transpose(0, 2, 1, 3), view.rows.pad(v).transpose(0, 2, 1, 3)

    def mlp_sublayer(self, x: jax.Array) -> jax.Array:
        """The second half of the layer: float32[..., H] to the same shape."""
        if not self.gemma:
            return x + self._mlp(self.post_attention_norm(x))
        out = self.post_feedforward_norm(self._mlp(self.pre_feedforward_norm(x)))
        return self.layer_scalar(x + out)

    def _mlp(self, h: jax.Array) -> jax.Array:
        gate = self.gate_proj(h)
        gate = jax.nn.gelu(gate, approximate=True) if self.gemma else jax.nn.silu(gate)
        return self.down_proj(gate * self.up_proj(h))
