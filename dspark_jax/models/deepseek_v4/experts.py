"""Mixture of experts: routing, and only the experts that rows were routed to.

    s   = sqrt(softplus(gate x))
    ids = the k largest s + bias, or a table's entry for the token id (hash layers)
    w   = s[ids] / sum s[ids] * route_scale
    y   = sum_k w_k expert_k(x) + shared(x)
    expert(x) = w2 (silu(min(w1 x, limit)) * clip(w3 x, -limit, limit))

Pairs of row and expert are sorted by expert and cut in tiles of a few rows that share
one. A loop runs over as many tiles as there are, so an expert that no row wants is
neither read nor expanded from its 4 bits, and a tile's product has the same shape
whatever the batch is. Contributions of a row are added in the order of its ids.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config_v4 import V4Config
from dspark_jax.models.deepseek_v4.parallel import Parallel
from dspark_jax.models.deepseek_v4.weights import ExpertMatrix, Matrix
from dspark_jax.models.layers import matmul
from dspark_jax.models.params import declare

# Rows of a tile, by how many pairs there are.
TILE = 8
WIDE_TILE = 32
WIDE_FROM = 4096


class Router(nnx.Module):
    """Which experts a row goes to, and with which weights."""

    def __init__(self, config: V4Config, by_token: bool):
        """Declares the gate, and the bias or the table of token ids."""
        count, k = config.num_experts, config.experts_per_token
        self.weight = declare((count, config.hidden_size), config.dtype, (None, None))
        table = (config.vocab_size, k)
        self.tid2eid = declare(table, "int32", (None, None)) if by_token else None
        self.bias = None if by_token else declare((count,), "float32", (None,))
        self.k, self.route_scale = k, config.route_scale

    def __call__(self, x: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(ids int32[G, k], weights float32[G, k]) of rows float32[G, H]."""
        raw = matmul(x, self.weight[...].astype(jnp.float32))
        score = jnp.sqrt(jax.nn.softplus(raw))
        if self.tid2eid is not None:
            ids = jnp.take(self.tid2eid[...], token, axis=0, mode="clip")
        else:
            assert self.bias is not None
            # The bias chooses; it is no part of the weights.
            _, ids = jax.lax.top_k(score + self.bias[...][None], self.k)
        weights = jnp.take_along_axis(score, ids, axis=1)
        total = jnp.sum(weights, axis=1, keepdims=True)
        return ids, weights / total * jnp.float32(self.route_scale)


class SharedExpert(nnx.Module):
    """The expert that every row goes to."""

    def __init__(self, config: V4Config):
        """Declares gate `w1`, up `w3` and down `w2`."""
        hidden, inner = config.hidden_size, config.moe_dim
        axes, dtype, kind = (None, None), config.dtype, config.weights
        self.w1 = Matrix(inner, hidden, axes, dtype, kind)
        self.w2 = Matrix(hidden, inner, axes, dtype, kind)
        self.w3 = Matrix(inner, hidden, axes, dtype, kind)
        self.limit = config.swiglu_limit

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32[G, H] to the same shape."""
        return self.w2(gated(self.w1(x), self.w3(x), self.limit))


class Experts(nnx.Module):
    """The routed experts, those of this device when they are split."""

    def __init__(self, config: V4Config):
        """Declares `w1`, `w3` and `w2` of all experts."""
        count, hidden, inner = config.num_experts, config.hidden_size, config.moe_dim
        kind = config.weights
        self.w1 = ExpertMatrix(count, inner, hidden, config.dtype, kind)
        self.w2 = ExpertMatrix(count, hidden, inner, config.dtype, kind)
        self.w3 = ExpertMatrix(count, inner, hidden, config.dtype, kind)
        self.limit = config.swiglu_limit

    def __call__(
        self, x: jax.Array, ids: jax.Array, weights: jax.Array, parallel: Parallel
    ) -> jax.Array:
        """The weighted sum over experts, and over devices.

        Args:
          x: float32[G, H].
          ids: int32[G, k]. Of all experts.
          weights: float32[G, k].
          parallel: see there.

        Returns:
          float32[G, H].
        """
        rows, k = ids.shape
        here = self.w1.count
        own = ids.reshape(-1) - parallel.index() * here
        # Pairs of other devices' experts come last and are left out.
        own = jnp.where((own >= 0) & (own < here), own, here)
        order = jnp.argsort(own, stable=True)
        size = WIDE_TILE if rows * k >= WIDE_FROM else TILE
        plan = _tiles(own[order], here, size)
        by_pair = jnp.zeros((rows * k + size, x.shape[1]), jnp.float32)
        flat = weights.reshape(-1)

        def one(tile: jax.Array, done: jax.Array) -> jax.Array:
            expert, first, end = (part[tile] for part in plan[:3])
            at = first + jnp.arange(size, dtype=jnp.int32)
            real = at < end
            pair = jnp.take(order, at, mode="clip")
            some = jnp.take(x, pair // k, axis=0, mode="clip")
            y = self._one(expert, some)
            y = y * jnp.where(real, jnp.take(flat, pair), 0.0)[:, None]
            # A tile's empty end lies where the next tile begins, or behind all.
            return jax.lax.dynamic_update_slice_in_dim(done, y, first, 0)

        by_pair = jax.lax.fori_loop(0, plan[3], one, by_pair)
        place = (
            jnp.zeros_like(order).at[order].set(jnp.arange(rows * k, dtype=order.dtype))
        )
        parts = jnp.take(by_pair, place.reshape(rows, k), axis=0)
        return parallel.total(
            functools.reduce(jnp.add, [parts[:, j] for j in range(k)])
        )

    def _one(self, expert: jax.Array, x: jax.Array) -> jax.Array:
        up = gated(
            matmul(x, self.w1.of(expert)), matmul(x, self.w3.of(expert)), self.limit
        )
        return matmul(up, self.w2.of(expert))


def gated(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """silu(gate) * up, the gate bounded above, the other on both sides."""
    gate = jnp.minimum(gate, jnp.float32(limit))
    return jax.nn.silu(gate) * jnp.clip(up, -limit, limit)


class MoE(nnx.Module):
    """Router, routed experts and the shared expert of a layer."""

    def __init__(self, config: V4Config, by_token: bool):
        """Declares all three."""
        self.gate = Router(config, by_token)
        self.experts = Experts(config)
        self.shared = SharedExpert(config)

    def __call__(self, x: jax.Array, token: jax.Array, parallel: Parallel) -> jax.Array:
        """float32[G, H] normed rows and int32[G] token ids -> float32[G, H]."""
        ids, weights = self.gate(x, token)
        # The shared expert is whole on every device: it joins behind the sum.
        return self.experts(x, ids, weights, parallel) + self.shared(x)


# Expert, first pair and end of each tile, int32[N]; and how many tiles there are.
Tiles = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _tiles(own: jax.Array, experts: int, size: int) -> Tiles:
    """Cuts sorted pairs into tiles of one expert.

    Args:
      own: int32[P]. Expert of each pair, ascending; `experts` for pairs to leave out.
      experts: E.
      size: pairs of a tile.
    """
    pairs = own.shape[0]
    most = pairs // size + min(experts, pairs)
    every = jnp.arange(experts, dtype=jnp.int32)
    begins = jnp.searchsorted(own, every, side="left").astype(jnp.int32)
    ends = jnp.searchsorted(own, every, side="right").astype(jnp.int32)
    count = (ends - begins + size - 1) // size
    behind = jnp.cumsum(count)
    tile = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.searchsorted(behind, tile, side="right").astype(jnp.int32)
    expert = jnp.minimum(expert, experts - 1)
    within = tile - (behind - count)[expert]
    return expert, begins[expert] + within * size, ends[expert], behind[-1]
