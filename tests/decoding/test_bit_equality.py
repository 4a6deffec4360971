"""A row's logits do not depend, to the bit, on where its block began.

The dimensions are those of the default model, the depth is not: what matters are
the row lengths that sums and products run over.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import AttentionConfig, DecoderConfig
from dspark_jax.models import attention, dense
from dspark_jax.models.kv_cache import empty_cache
from dspark_jax.models.params import for_cpu, random_params
from dspark_jax.models.rows import dense_rows, uniform_rows

CAPACITY, WIDTH, PROMPT, STEPS = 128, 6, 59, 12
CONFIG = DecoderConfig(
    architecture="llama",
    vocab_size=1024,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    layer_types=("full",) * 2,
    full=AttentionConfig(num_kv_heads=3, head_dim=64),
    tie_embeddings=True,
    dtype="bfloat16",
)


@pytest.fixture(scope="module")
def params():
    shapes = dense.abstract_params(CONFIG)
    return for_cpu(random_params(shapes, jax.random.key(0)))


def logits(params, batch: int, length: int, config=CONFIG) -> np.ndarray:
    """Rows of given tokens, evaluated `length + 1` at a time. [B, STEPS, V]."""
    tokens = jax.random.randint(
        jax.random.key(1), (batch, PROMPT + STEPS), 0, config.vocab_size, jnp.int32
    )
    cache = empty_cache(config, batch, CAPACITY, jnp.dtype("float32"), False)
    zero = jnp.zeros((batch,), jnp.int32)
    full = jnp.full((batch,), PROMPT, jnp.int32)

    def prefill(params, cache):
        rows = dense_rows(tokens[:, :PROMPT], full, zero)
        _, _, pending = dense.evaluate(config, params, cache, CAPACITY, rows)
        return dense.commit(config, cache, pending, zero, full)

    def step(params, cache, block, start):
        real = jnp.full((batch,), length + 1, jnp.int32)
        bucket = max(2, batch * (length + 1))
        rows = uniform_rows(block, real, start, WIDTH, bucket)
        out, _, pending = dense.evaluate(config, params, cache, CAPACITY, rows)
        return out, dense.commit(config, cache, pending, start, real)

    cache, step = jax.jit(prefill)(params, cache), jax.jit(step)
    found = []
    for at in range(0, STEPS, length + 1):
        block = tokens[:, PROMPT + at : PROMPT + at + length + 1]
        out, cache = step(params, cache, block, full + at)
        out = np.asarray(out)[: batch * (length + 1)]
        found.append(out.reshape(batch, length + 1, -1))
    return np.concatenate(found, axis=1)


# The blocks cross the edge between two tiles of positions, at 64.
@pytest.mark.parametrize("batch", [1, 4])
def test_logits_are_bit_equal_for_every_block_length(params, batch):
    plain = logits(params, batch, 0)
    for length in (1, 2, 5):
        assert (logits(params, batch, length) == plain).all(), length


def attended(start: int) -> np.ndarray:
    """Attention of position 65, its block beginning at `start` of 60..65."""
    keys = jax.random.split(jax.random.key(2), 3)
    q = jax.random.normal(keys[0], (1, 72, 9, 64))
    k, v = (jax.random.normal(key, (1, 3, 72, 64)) for key in keys[1:])
    slots, tile = attention.slots_for(CAPACITY), attention.tile_size(CAPACITY)
    at = attention.layout(
        jnp.asarray([start], jnp.int32), WIDTH, slots, tile, None, causal=True
    )

    def cached(x):
        return jnp.pad(x[:, :, :start], ((0, 0), (0, 0), (0, slots - start), (0, 0)))

    block = slice(start, start + WIDTH)
    out = attention.block_attention(
        q[:, block], k[:, :, block], v[:, :, block], cached(k), cached(v), at, 0.125
    )
    return np.asarray(out)[0, 65 - start]


def test_attention_is_bit_equal_wherever_the_block_begins():
    found = [attended(start) for start in range(60, 66)]
    assert all((row == found[0]).all() for row in found)


# At both sides of where more tiles are read: after two and after five of ten.
@pytest.mark.parametrize("cached", [130, 192, 383, 384])
@pytest.mark.parametrize("batch", [1, 3])
def test_tiles_that_nobody_reached_change_no_bit(batch, cached):
    """Every choice of tiles that holds the cached positions, at a larger cache."""
    capacity = 512
    slots, tile = attention.slots_for(capacity), attention.tile_size(capacity)
    keys = jax.random.split(jax.random.key(3), 5)
    q = jax.random.normal(keys[0], (batch, WIDTH, 9, 64))
    k, v = (jax.random.normal(key, (batch, 3, WIDTH, 64)) for key in keys[1:3])
    caches = [jax.random.normal(key, (batch, 3, slots, 64)) for key in keys[3:]]
    # The longest request decides, and the others lie tiles behind it.
    start = cached - jnp.arange(batch, dtype=jnp.int32) * 64
    at = attention.layout(start, WIDTH, slots, tile, None, causal=True)
    args = (q, k, v, *caches, at)
    every, needed = slots // tile, cached // tile
    whole = np.asarray(attention._attend(*args, scale=0.125, tiles=every))
    part = np.asarray(attention._attend(*args, scale=0.125, tiles=needed))
    assert (part == whole).all()
    assert (np.asarray(attention.block_attention(*args, 0.125)) == whole).all()
    # A choice that leaves cached positions out is another result.
    fewer = np.asarray(attention._attend(*args, scale=0.125, tiles=needed - 1))
    assert np.abs(fewer - whole).max() > 1e-3


def test_control_two_sums_that_meet_at_the_block_differ(monkeypatch):
    """With the cache summed up to the block, a position moves between two sums."""

    def at_the_block(start, width, slots, tile, sliding, causal):
        key = jnp.arange(slots, dtype=jnp.int32).reshape(1, -1, 1, tile)
        tiles = attention.window_tiles(width, tile)
        offset = jnp.arange(tiles * tile, dtype=jnp.int32).reshape(1, tiles, 1, tile)
        row = jnp.arange(width, dtype=jnp.int32).reshape(1, 1, -1, 1)
        below = key < start[:, None, None, None]
        return attention.Layout(
            start=start,
            window_start=start,
            cache_mask=jnp.broadcast_to(below, (*below.shape[:2], width, tile)),
            window_mask=offset <= row,
            tile=tile,
        )

    monkeypatch.setattr(attention, "layout", at_the_block)
    found = [attended(start) for start in range(60, 66)]
    for row in found:
        np.testing.assert_allclose(row, found[0], rtol=0, atol=1e-5)
    assert any((row != found[0]).any() for row in found)
