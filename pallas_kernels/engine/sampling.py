"""The engine's sampler: weights in units of 2^-31, and an unbiased point.

Probabilities are cut, not rounded, to weights w, so that a row loses up to V units
(6e-5 of its mass at 129280 tokens) and a token below 2^-31 is never drawn. The total W
of a row may exceed 2^31 by what float32 rounding added, so weights, sums and points are
uint32. A point is a word modulo W; words at or above the last whole multiple of W are
left out, which makes every point equally likely.

None of this depends on the order of sums, but the float probabilities do, and a token
may hang on their last bit: a total that crosses 2^31 allows other words, and a small
total, as a residual has, gives another remainder for every change of a unit.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.engine.streams import stream_block
from pallas_kernels.locate import locate
from pallas_kernels.vocab_axis import row_sum

UNITS = 1 << 31
LANES = 2048
# Rows narrower than this have a lane for every token.
FOLDED_FROM = 8192
# Any word is left out with probability at most 1/2, so that no point is found in as
# many blocks of four with probability at most 2^-128.
MAX_BLOCKS = 32

Order = Literal["lanes", "ids"]


class Drawn(NamedTuple):
    """Tokens of `R` rows and how they came about.

    token: int32[R], -1 for a row whose weights are all zero.
    point: uint32[R]. Where on the line of cumulative weights; 0 if token is -1.
    words: int32[R]. Words that the stream gave, the last of them used.
    """

    token: jax.Array
    point: jax.Array
    words: jax.Array


def fixed_weights(probs: jax.Array) -> jax.Array:
    """Probabilities in units of 2^-31, cut.

    Args:
      probs: float32[...] in [0, 1], or above 1 by rounding.

    Returns:
      uint32[...], trunc(p * 2^31); the product is exact.
    """
    return (probs * jnp.float32(UNITS)).astype(jnp.uint32)


def first_point(words: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Point from the first word that may be used, of those at hand.

    Args:
      words: uint32[..., n], in the order of their stream.
      total: uint32[...]. Weight of a row; 0 is taken as 1.

    Returns:
      (point uint32[...], words int32[...]): z mod total for the first word z below the
      last whole multiple of `total` in 2^32 - 1, and how many words that took. If there
      is none, words is 0 and the point comes from the first word.
    """
    divisor = jnp.maximum(total, jnp.uint32(1))
    limit = jnp.uint32(0xFFFFFFFF) // divisor * divisor
    usable = words < limit[..., None]
    first = jnp.argmax(usable, -1).astype(jnp.int32)
    word = jnp.take_along_axis(words, first[..., None], -1)[..., 0]
    return word % divisor, jnp.where(usable.any(-1), first + 1, 0)


def draw_point(
    total: jax.Array, seed: jax.Array, position: jax.Array, stream: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """A point of [0, total), all equally likely.

    Takes blocks until every row has its point, but at most 32. A row needs more with
    probability at most 2^-128, and then gets a word of the last block modulo `total`,
    words 0.

    Args:
      total: uint32[R]. Weight of each row; 0 gives point 0.
      seed: uint32[R, 2], low word first.
      position: int32[R], at least 0.
      stream: `FRESH` or `REPLACEMENT`, or int32[R].

    Returns:
      (point uint32[R], words int32[R]), see `first_point`.
    """

    def missing(state):
        block, _, words = state
        return (block < MAX_BLOCKS) & (words == 0).any()

    def take_block(state):
        block, point, words = state
        found = stream_block(seed, position, stream, block.astype(jnp.uint32))
        new_point, more = first_point(found, total)
        open_row = words == 0
        more = jnp.where(more > 0, 4 * block + more, 0)
        point = jnp.where(open_row, new_point, point)
        return block + 1, point, jnp.where(open_row, more, words)

    start = (jnp.int32(0), jnp.zeros_like(total), jnp.zeros_like(position))
    _, point, words = jax.lax.while_loop(missing, take_block, start)
    return point, words


def locate_by_lane(weights: jax.Array, point: jax.Array) -> jax.Array:
    """Token in whose interval a point lies, in the engine's order of tokens.

    Rows of 8192 tokens and more are dealt to 2048 lanes, token x to lane x mod 2048;
    the line of cumulative weights runs along the first lane, then along the second. In
    narrower rows the lanes are at least as many as the tokens and their order is that
    of the ids.

    Args:
      weights: uint32[R, V], each row with a sum below 2^32.
      point: uint32[R]. Below the row's sum.

    Returns:
      int32[R]; -1 for a row without positive weight.
    """
    rows, width = weights.shape
    if width < FOLDED_FROM:
        return locate(weights, point)
    weights = jnp.pad(weights, ((0, 0), (0, -width % LANES)))
    depth = weights.shape[1] // LANES
    lanes = weights.reshape(rows, depth, LANES).swapaxes(1, 2)
    place = locate(lanes.reshape(rows, -1), point)
    token = place % depth * LANES + place // depth
    return jnp.where(place < 0, -1, token)


def draw(
    weights: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    stream: jax.Array | int,
    *,
    order: Order = "lanes",
) -> Drawn:
    """One token a row, x with probability w(x) / W.

    Args:
      weights: uint32[R, V], see `fixed_weights`.
      seed: uint32[R, 2], low word first; `draft_seed` of it for a draft.
      position: int32[R], at least 0. See `decode_position` and `draft_position`.
      stream: `FRESH`, also for a draft, or `REPLACEMENT`, or int32[R].
      order: static. Tokens along the line: "lanes" as the engine has them, or "ids".
        The law is the same, the tokens are not.

    Returns:
      Drawn.

    Raises:
      ValueError: shapes that do not belong together, wrong dtypes, unknown `order`.
    """
    if order not in get_args(Order):
        raise ValueError(f"`order` is {order!r}; allowed: {get_args(Order)}")
    if weights.ndim != 2 or weights.dtype != jnp.uint32:
        raise ValueError(f"`weights` is {weights.dtype}{weights.shape}; uint32[R, V]")
    require_streams(weights.shape[0], seed, position)
    total = row_sum(weights)
    point, words = draw_point(total, seed, position, stream)
    find = locate_by_lane if order == "lanes" else locate
    return Drawn(find(weights, point), point, words)


def require_streams(rows: int, seed: jax.Array, position: jax.Array) -> None:
    """ValueError unless there are a seed and a position for each of `rows` rows."""
    if seed.shape != (rows, 2) or seed.dtype != jnp.uint32:
        raise ValueError(
            f"`seed` is {seed.dtype}{seed.shape}; for {rows} rows it must be "
            f"uint32[{rows}, 2], low word first"
        )
    if position.shape != (rows,) or position.dtype != jnp.int32:
        raise ValueError(
            f"`position` is {position.dtype}{position.shape}; for {rows} rows it must "
            f"be int32[{rows}]"
        )
