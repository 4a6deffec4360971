"""Flat rows: what one evaluation of a target or draft works on.

`G` rows of `B` requests are evaluated together. Dense layers see `[G, H]`;
only attention re-pads to `[B, T]`.

    request   0 0 0 1 1 .        row order within a request is position order
    position  7 8 9 4 5 .        "." is a padding row: is_real False
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["token", "request", "local_step", "position", "is_real", "start"],
    meta_fields=["width", "is_dense"],
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """A batch of rows.

    Attributes:
      token: int32[G]. Input ids.
      request: int32[G]. Request of each row, below B.
      local_step: int32[G]. Index within the request's block, 0 the anchor.
      position: int32[G]. Absolute 0-based position.
      is_real: bool[G]. False for padding rows.
      start: int32[B]. Position of each request's first row, which is also the
        number of its committed positions.
      width: T, the static number of rows a request is padded to in attention.
      is_dense: static; the rows already are the padded block [B, T] in order.
    """

    token: jax.Array
    request: jax.Array
    local_step: jax.Array
    position: jax.Array
    is_real: jax.Array
    start: jax.Array
    width: int
    is_dense: bool

    @property
    def batch(self) -> int:
        """B, the number of requests."""
        return self.start.shape[0]

    def block_positions(self) -> jax.Array:
        """int32[B, T]. Position of every padded attention row."""
        steps = jnp.arange(self.width, dtype=jnp.int32)[None]
        return self.start[:, None] + steps

    def pad(self, x: jax.Array) -> jax.Array:
        """[G, ...] -> [B, T, ...]; slots without a row hold zeros."""
        shape = (self.batch, self.width)
        if self.is_dense:
            return x.reshape(*shape, *x.shape[1:])
        count = self.batch * self.width
        slot = self.request * self.width + self.local_step
        slot = jnp.where(self.is_real, slot, count)
        source = jnp.full((count,), x.shape[0], jnp.int32)
        order = jnp.arange(x.shape[0], dtype=jnp.int32)
        source = source.at[slot].set(order, mode="drop")
        padded = jnp.take(x, source, axis=0, mode="fill", fill_value=0)
        return padded.reshape(*shape, *x.shape[1:])

    def flat(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [G, ...]; inverse of `pad` on real rows."""
        flat = x.reshape(self.batch * self.width, *x.shape[2:])
        if self.is_dense:
            return flat
        return jnp.take(
            flat, self.request * self.width + self.local_step, axis=0, mode="clip"
        )


def dense_rows(tokens: jax.Array, lengths: jax.Array, start: jax.Array) -> Rows:
    """Rows of a right-padded block.

    Args:
      tokens: int32[B, T]. Right-padded.
      lengths: int32[B]. Real tokens of each request, 0..T.
      start: int32[B]. Position of each request's first token.

    Returns:
      Rows with G = B * T.
    """
    batch, width = tokens.shape
    step = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], tokens.shape)
    request = jnp.broadcast_to(
        jnp.arange(batch, dtype=jnp.int32)[:, None], tokens.shape
    )
    return Rows(
        token=tokens.reshape(-1),
        request=request.reshape(-1),
        local_step=step.reshape(-1),
        position=(start[:, None] + step).reshape(-1),
        is_real=(step < lengths[:, None]).reshape(-1),
        start=start,
        width=width,
        is_dense=True,
    )


def uniform_rows(
    tokens: jax.Array, lengths: jax.Array, start: jax.Array, width: int, bucket: int
) -> Rows:
    """Rows of equally long blocks, packed into `bucket` rows.

    Args:
      tokens: int32[B, n]. The block of each request.
      lengths: int32[B]. Real rows of each request, 0..n.
      start: int32[B]. Position of each request's first row.
      width: T >= n, the attention padding.
      bucket: G, either B * n or more.

    Returns:
      Rows with G = bucket; rows past B * n are padding.
    """
    packed = dense_rows(tokens, lengths, start)
    extra = bucket - tokens.size
    if tokens.shape[1] == width and not extra:
        return packed

    def grow(x: jax.Array) -> jax.Array:
        return jnp.pad(x, (0, extra))

    return Rows(
        token=grow(packed.token),
        request=grow(packed.request),
        local_step=grow(packed.local_step),
        position=grow(packed.position),
        is_real=grow(packed.is_real),
        start=start,
        width=width,
        is_dense=False,
    )


def packed_rows(
    tokens: jax.Array, lengths: jax.Array, start: jax.Array, width: int, bucket: int
) -> Rows:
    """Rows of blocks that may differ in length, packed into `bucket` rows.

    Args:
      tokens: int32[B, n]. The block of each request, right-padded.
      lengths: int32[B]. Real rows of each request, 0..n; together at most `bucket`.
      start: int32[B]. Position of each request's first row.
      width: T >= n, the attention padding.
      bucket: G.

    Returns:
      Rows with G = bucket, request by request; rows past the last one are padding.
    """
    end = jnp.cumsum(lengths)
    at = jnp.arange(bucket, dtype=jnp.int32)
    request = jnp.sum(at[:, None] >= end[None], axis=1, dtype=jnp.int32)
    request = jnp.minimum(request, tokens.shape[0] - 1)
    is_real = at < end[-1]
    step = jnp.where(is_real, at - (end - lengths)[request], 0)
    return Rows(
        token=jnp.where(is_real, tokens[request, step], 0),
        request=request,
        local_step=step,
        position=start[request] + step,
        is_real=is_real,
        start=start,
        width=width,
        is_dense=False,
    )


def first_rows(rows: Rows, count: int) -> Rows:
    """The first `count` rows; the others must be padding."""

    def cut(x: jax.Array) -> jax.Array:
        return x[:count]

    return dataclasses.replace(
        rows,
        token=cut(rows.token),
        request=cut(rows.request),
        local_step=cut(rows.local_step),
        position=cut(rows.position),
        is_real=cut(rows.is_real),
        is_dense=False,
    )


def picked(x: jax.Array, wanted: jax.Array | None) -> jax.Array:
    """Rows whose logits are wanted, [R, ...] and at least two of them.

    The caller cuts to R: XLA on CPU multiplies one row in another order than two.

    Args:
      x: [G, ...].
      wanted: int32[R]; None: all rows.
    """
    if wanted is None:
        return x
    least = jnp.broadcast_to(wanted, (max(2, *wanted.shape),))
    return jnp.take(x, least, axis=0, mode="clip")


def side_by_side(parts: list[jax.Array], count: int) -> jax.Array:
    """float32[G, m * H] of m parts float32[G, H]; none: float32[count, 0]."""
    if not parts:
        return jnp.zeros((count, 0), jnp.float32)
    return jnp.concatenate(parts, axis=-1)
