"""Which compressed entries a row sees in layers of ratio 4.

    score[p, w] = sum_h weight[p, h] relu(q[p, h] . k[w])

The best `index_topk` of the entries below (p + 1) // 4 are kept. Scores only choose;
they are no part of the attention's weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config_v4 import SELECTED_RATIO, V4Config
from dspark_jax.models.deepseek_v4 import recent, rotary, rounding
from dspark_jax.models.deepseek_v4.compressor import Compressor, EntryView
from dspark_jax.models.deepseek_v4.parallel import Parallel
from dspark_jax.models.deepseek_v4.state import EntryState
from dspark_jax.models.deepseek_v4.weights import Matrix
from dspark_jax.models.rows import Rows

# Rows of a request that are scored at once: all entries for all heads of one row are
# 64 * context / 4 numbers.
ROWS_AT_ONCE = 16


class Indexer(nnx.Module):
    """Queries of its own against compressed keys of its own."""

    def __init__(self, config: V4Config):
        """Declares the query projection, the head weights and the compressor."""
        heads, dim = config.index_heads, config.index_dim
        self.wq_b = Matrix(
            heads * dim,
            config.q_rank,
            ("index_heads", None),
            config.dtype,
            config.weights,
        )
        self.weights_proj = Matrix(
            heads,
            config.hidden_size,
            ("index_heads", None),
            config.dtype,
            in_float32=True,
        )
        self.compressor = Compressor(config, SELECTED_RATIO, dim, for_index=True)
        self.dim, self.topk = dim, config.index_topk
        self.scale = dim**-0.5 * heads**-0.5
        self.rounds = config.round_activations

    def __call__(
        self,
        x: jax.Array,
        q_rank: jax.Array,
        rows: Rows,
        view: EntryView,
        at: rotary.Tables,
        state: EntryState,
        parallel: Parallel,
    ) -> tuple[jax.Array, EntryState]:
        """Numbers of the entries that each row sees.

        Args:
          x: float32[G, H]. Normed input of the attention.
          q_rank: float32[G, q_rank]. Normed low-rank queries.
          rows: the flat rows.
          view: of the block's entries.
          at: rotary tables of the rows, [B, T, rope_dim / 2].
          state: the indexer's committed rows and entries.
          parallel: see there.

        Returns:
          (int32[B, T, k], ascending; M, the number of slots, where fewer are seen,
          and what the block adds to the indexer's entries).
        """
        pending = self.compressor(x, rows, view, state)
        q = rows.pad(self.wq_b(q_rank))
        q = q.reshape(*q.shape[:2], -1, self.dim)
        q = rotary.rotate_tail(q, (at[0][:, :, None], at[1][:, :, None]))
        if self.rounds:
            q = rounding.round_index(q)
        weight = rows.pad(self.weights_proj(x)) * jnp.float32(self.scale)
        old = self._scores(q, weight, state["entries"])
        new = self._scores(q, weight, pending["entries"])
        score = parallel.total(_in_place(old, new, view.first))
        return self._best(score, rows), pending

    def _scores(self, q: jax.Array, weight: jax.Array, keys: jax.Array) -> jax.Array:
        """float32[B, T, M] of queries [B, T, N, d], weights [B, T, N], keys."""

        def some(q: jax.Array, weight: jax.Array) -> jax.Array:
            b, t, n, d = q.shape
            exact = jax.lax.Precision.HIGHEST
            raw = jax.lax.dot_general(
                q.reshape(b, t * n, d).astype(keys.dtype),
                keys,
                (((2,), (2,)), ((0,), (0,))),
                precision=exact if keys.dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )
            raw = jax.nn.relu(raw).reshape(b, t, n, -1)
            return jnp.sum(raw * weight[..., None], axis=2)

        width = q.shape[1]
        if width <= ROWS_AT_ONCE or width % ROWS_AT_ONCE:
            return some(q, weight)

        def cut(x: jax.Array) -> jax.Array:
            parts = x.reshape(x.shape[0], -1, ROWS_AT_ONCE, *x.shape[2:])
            return parts.swapaxes(0, 1)

        parts = jax.lax.map(lambda pair: some(*pair), (cut(q), cut(weight)))
        return parts.swapaxes(0, 1).reshape(q.shape[0], width, -1)

    def _best(self, score: jax.Array, rows: Rows) -> jax.Array:
        slots = score.shape[-1]
        seen = (rows.block_positions() + 1) // SELECTED_RATIO
        number = recent.numbers(slots, 3)
        score = jnp.where(number < seen[..., None], score, -jnp.inf)
        value, best = jax.lax.top_k(score, min(self.topk, slots))
        # In order of number: the sum over them does not depend on how scores differ.
        return jnp.sort(jnp.where(value > -jnp.inf, best, slots), axis=-1)


def _in_place(old: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
    """Scores with those of a block's own entries, which begin at `first`, in place."""
    number = recent.numbers(old.shape[-1], 2) - first[:, None]
    own = jnp.clip(number, 0, new.shape[-1] - 1)[:, None]
    own = jnp.take_along_axis(new, own, axis=2)
    return jnp.where((number >= 0)[:, None], own, old)


def chosen(
    old: jax.Array, new: jax.Array, first: jax.Array, number: jax.Array
) -> jax.Array:
    """Entries by number, from the store below `first` and from the block behind it.

    Args:
      old: [B, M, d].
      new: [B, E, d].
      first: int32[B].
      number: int32[B, T, k].

    Returns:
      [B, T, k, d]; finite garbage for numbers that do not exist.
    """
    behind = number - first[:, None, None]
    return jnp.where(
        (behind >= 0)[..., None], recent.take(new, jnp.maximum(behind, 0)),
        recent.take(old, number),
    )  # fmt: skip
