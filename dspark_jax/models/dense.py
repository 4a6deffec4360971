"""A dense target as pure functions: declare, evaluate rows, commit.

    logits, features, pending = evaluate(config, params, cache, C, rows, taps)
    cache = commit(config, cache, pending, rows.start, count)

`evaluate` never writes the cache. `commit` stores all T rows of each block at
the block's own positions; the caller moves the length by the rows it keeps, and
what lies beyond is masked and later overwritten.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from dspark_jax.config import DecoderConfig
from dspark_jax.models import kv_cache
from dspark_jax.models.attention import block_fits, slots_for
from dspark_jax.models.decoder_layer import block_view
from dspark_jax.models.kv_cache import Cache
from dspark_jax.models.layers import (
    Norm,
    Table,
    embed,
    embed_scale,
    existing,
    matmul,
    softcap,
)
from dspark_jax.models.params import Axes, Tree, build, stack_shapes
from dspark_jax.models.params import for_cpu as listed_for_cpu
from dspark_jax.models.rows import Rows, picked, side_by_side
from dspark_jax.models.stack import layer_declaration, run_layers


class _Ends(nnx.Module):
    """Embedding, final norm and, unless tied, the output head."""

    def __init__(self, config: DecoderConfig):
        """Declares the tables and the norm."""
        v, h, dtype = config.vocab_size, config.hidden_size, config.dtype
        self.embed = Table(v, h, ("vocab", "embed"), dtype)
        self.norm = Norm(h, config.rms_norm_eps, dtype)
        if not config.tie_embeddings:
            self.lm_head = Table(v, h, ("vocab", "embed"), dtype)


@functools.cache
def declaration(config: DecoderConfig) -> tuple[Tree, Tree]:
    """(shapes, axes) of all parameters, layers stacked by kind."""
    _, shapes, axes = build(lambda: _Ends(config))
    layer_shapes, layer_axes = declare_layers(config)
    return {**shapes, "layers": layer_shapes}, {**axes, "layers": layer_axes}


def declare_layers(config: DecoderConfig) -> tuple[Tree, Tree]:
    """(shapes, axes) of the stacked layer groups by kind."""
    shapes: Tree = {}
    axes: Tree = {}
    for kind in config.kinds:
        _, one, names = layer_declaration(config, kind)
        count = config.layer_types.count(kind)
        shapes[kind], axes[kind] = stack_shapes(one, names, count)
    return shapes, axes


def abstract_params(config: DecoderConfig) -> Tree:
    """Nested dict of `jax.ShapeDtypeStruct`, layers stacked by kind."""
    return declaration(config)[0]


def unit_counts(config: DecoderConfig) -> dict[str, int]:
    """Units of logical axes that sharding must not cut inside one."""
    kv = [config.attention(kind).num_kv_heads for kind in config.kinds]
    return {"heads": config.num_heads, "kv_heads": min(kv, default=1)}


def embed_rows(config: DecoderConfig, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Embedded ids as the residual stream's start, float32[..., H]."""
    x = embed(table, ids)
    if config.architecture == "gemma4":
        whole = jnp.issubdtype(table.dtype, jnp.integer)
        dtype = config.dtype if whole else table.dtype.name
        x = x * embed_scale(config.hidden_size, dtype)
    return x


def head_table(params: Tree) -> jax.Array:
    """The output head's weight; the embedding when they are tied."""
    return params["lm_head" if "lm_head" in params else "embed"]["weight"]


def head_logits(
    config: DecoderConfig, hidden: jax.Array, table: jax.Array
) -> jax.Array:
    """float32[R, V] from normed hidden rows; ids that do not exist are -inf."""
    logits = softcap(matmul(hidden, table), config.logit_softcap)
    return existing(logits, config.valid_vocab)


def evaluate(
    config: DecoderConfig,
    params: Tree,
    cache: Cache,
    capacity: int,
    rows: Rows,
    taps: tuple[int, ...] = (),
    logit_rows: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array, Cache]:
    """Evaluates rows against the committed positions; writes nothing.

    Args:
      config: the target.
      params: plain dict, see `declaration`.
      cache: committed keys and values; positions below `rows.start` are read.
      capacity: C, positions the cache was made for.
      rows: G rows; row j of a request sees its earlier rows and the cache.
      taps: layers whose outputs make the draft's context features.
      logit_rows: int32[R]. Rows whose logits are wanted; None is all of them.
      mesh: unused; how work is split follows from where parameters lie.

    Returns:
      logits: float32[R, V].
      features: float32[G, m * H]. Tapped outputs side by side, in the order of
        `taps` (DSpark paper, section 3).
      pending: the block's own keys and values, `[B, K, T, d]` a layer.
    """
    del mesh
    x = embed_rows(config, params["embed"]["weight"], rows.token)
    views = {kind: block_view(config, kind, rows, capacity) for kind in config.kinds}
    x, tapped, pending = run_layers(config, params["layers"], x, views, cache, taps)
    features = side_by_side(tapped, x.shape[0])
    x = picked(x, logit_rows)
    norm = nnx.merge(norm_graph(config), params["norm"])
    logits = head_logits(config, norm(x), head_table(params))
    return (
        logits[: len(logits if logit_rows is None else logit_rows)],
        features,
        pending,
    )


@functools.cache
def norm_graph(config: DecoderConfig) -> nnx.GraphDef:
    """Graph definition of a norm of the residual stream."""
    return build(lambda: Norm(config.hidden_size, config.rms_norm_eps, config.dtype))[0]


def commit(
    config: DecoderConfig,
    cache: Cache,
    pending: Cache,
    start: jax.Array,
    count: jax.Array,
) -> Cache:
    """Stores pending blocks at their positions; see `kv_cache.write_rows`.

    All rows are written, those behind the first `count` where no mask lets them
    through.
    """
    del config, count
    return kv_cache.write_rows(cache, pending, start)


def for_cpu(config: DecoderConfig, params: Tree, whole_numbers: bool = False) -> Tree:
    """`params` as decoding on a CPU wants them; see `params.for_cpu`."""
    del config
    return listed_for_cpu(params, whole_numbers)


def check_mesh(config: DecoderConfig, mesh: Mesh) -> None:
    """Any mesh will do: what does not divide lies whole on every device."""
    del config, mesh


def chunk_fits(start: int, width: int, capacity: int) -> bool:
    """Whether a block of `width` rows may begin at `start`; see `block_fits`."""
    return block_fits(start, width, capacity, slots_for(capacity))


def grown(config: DecoderConfig, cache: Cache, capacity: int, more: int) -> Cache:
    """A cache with room for `more` positions; see `kv_cache.longer`."""
    del config
    return kv_cache.longer(cache, capacity, more)


def state_axes(leaf: jax.Array) -> Axes:
    """Logical axes of a cache's leaf."""
    return kv_cache.cache_axes(leaf)


def empty_state(
    config: DecoderConfig,
    batch: int,
    capacity: int,
    dtype: jnp.dtype,
    stacked: bool = False,
) -> Cache:
    """An empty cache; see `kv_cache.empty_cache`."""
    return kv_cache.empty_cache(config, batch, capacity, dtype, stacked)


def state_bytes(
    config: DecoderConfig, batch: int, capacity: int, dtype: jnp.dtype
) -> int:
    """Bytes of a cache."""
    return kv_cache.cache_bytes(config, batch, capacity, dtype)


def cut(
    config: DecoderConfig, cache: Cache, place: jax.Array, start: jax.Array, size: int
) -> Cache:
    """Some positions of one request; see `kv_cache.cut`."""
    del config
    return kv_cache.cut(cache, place, start, size)


def put(config: DecoderConfig, cache: Cache, part: Cache, place: jax.Array) -> Cache:
    """Writes a request's first positions; see `kv_cache.put`."""
    del config
    return kv_cache.put(cache, part, place)
