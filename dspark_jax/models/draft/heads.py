"""Markov and confidence heads of a draft (DSpark paper, sections 3.2, 3.3).

The backbone gives base logits for all positions of a block at once. The Markov
head adds a bias that depends on the previous token, so positions are sampled in
order:

    logits_k = U_k + W2 z_k,   e = W1[previous token]
    vanilla  z = e
    gated    z = sigmoid(Wg [h_k ; e] + bg) * e
    rnn      p = Wj [s_k ; e ; h_k] + bj  in three parts gate, cand, out
             s_{k+1} = G s_k + (1 - G) tanh(p_cand),  G = sigmoid(p_gate)
             z = tanh(p_out),  s_0 = 0

Confidence reads the previous token only, so it is known before the position is
sampled: logit_k = w [h_k ; e] + b (DeepSeek-V4 drafts have no b).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config import DecoderConfig
from dspark_jax.config_draft import DraftConfig
from dspark_jax.models.layers import Linear, Table, embed, matmul
from dspark_jax.models.params import declare


class MarkovHead(nnx.Module):
    """The sequential head; `vanilla`, `gated` or `rnn`."""

    def __init__(self, config: DraftConfig):
        """Declares the tables and the kind's projection."""
        h, r = config.backbone.hidden_size, config.markov_rank
        vocab, dtype = config.backbone.vocab_size, config.backbone.dtype
        self.kind = config.markov_head
        self.w1 = Table(vocab, r, (None, None), dtype)
        self.w2 = Table(config.head_rows, r, ("vocab", None), dtype)
        if self.kind == "gated":
            self.gate = Linear(r, h + r, (None, None), dtype, bias=True)
        if self.kind == "rnn":
            self.joint = Linear(3 * r, 2 * r + h, (None, None), dtype, bias=True)

    def embed(self, previous: jax.Array) -> jax.Array:
        """int32[B] target ids -> float32[B, r]."""
        return embed(self.w1.weight[...], previous)

    def initial_state(self, batch: int) -> jax.Array:
        """The state a block starts from, float32[B, r]; used by `rnn` only."""
        return jnp.zeros((batch, self.w1.weight[...].shape[1]), jnp.float32)

    def step(
        self, hidden: jax.Array, embedded: jax.Array, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The bias of one position.

        Args:
          hidden: float32[B, H]. Backbone row after the final norm.
          embedded: float32[B, r]. `embed` of the previous token.
          state: float32[B, r].

        Returns:
          (bias float32[B, V_draft], next state float32[B, r]).
        """
        z, state = self.latent(hidden, embedded, state)
        return matmul(z, self.w2.weight[...]), state

    def latent(
        self, hidden: jax.Array, embedded: jax.Array, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """z of one position, float32[B, r], and the next state; as `step`."""
        z = embedded
        if self.kind == "gated":
            gate = self.gate(jnp.concatenate([hidden, embedded], axis=-1))
            z = jax.nn.sigmoid(gate) * embedded
        if self.kind == "rnn":
            parts = self.joint(jnp.concatenate([state, embedded, hidden], axis=-1))
            gate, candidate, out = jnp.split(parts, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state = gate * state + (1.0 - gate) * jnp.tanh(candidate)
            z = jnp.tanh(out)
        return z, state


class ConfidenceHead(nnx.Module):
    """Acceptance logit of a position, computed in float32."""

    def __init__(self, config: DraftConfig):
        """Declares one row of weights and, but for DeepSeek-V4 drafts, a bias."""
        width = config.backbone.hidden_size
        width += config.markov_rank if config.confidence_with_markov else 0
        dtype = config.backbone.dtype
        self.with_markov = config.confidence_with_markov
        self.weight = declare((1, width), dtype, (None, None))
        has_bias = isinstance(config.backbone, DecoderConfig)
        self.bias = declare((1,), dtype, (None,)) if has_bias else None

    def __call__(self, hidden: jax.Array, embedded: jax.Array | None) -> jax.Array:
        """float32[..., H] (and float32[..., r]) -> float32[...] logits."""
        x = hidden
        if self.with_markov and embedded is not None:
            x = jnp.concatenate([hidden, embedded], axis=-1)
        weight = self.weight[...].astype(jnp.float32)
        # An elementwise product and a sum: one row would be a slow dot.
        row = weight.reshape((1,) * (x.ndim - 1) + weight.shape[1:])
        logit = jnp.sum(x * row, axis=-1)
        if self.bias is None:
            return logit
        bias = self.bias[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1))
        return logit + bias
