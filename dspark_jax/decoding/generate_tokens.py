"""The whole generation as one traced program: tokens in, tokens out."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dspark_jax.decoding.extras import Extras
from dspark_jax.decoding.masks import packed_in_program
from dspark_jax.decoding.plans import (
    check_deterministic,
    check_seeds,
    make_plan,
    policy_length,
)
from dspark_jax.decoding.prefill import begin, feed
from dspark_jax.decoding.publishing import RoundOut
from dspark_jax.decoding.requests import (
    Requests,
    Variant,
    check_verification,
    is_noisy,
    pack_requests,
    variant_of,
)
from dspark_jax.decoding.round import decode_round
from dspark_jax.decoding.schedule import with_memory
from dspark_jax.decoding.shapes import Shapes
from dspark_jax.decoding.state import RUNNING, Counters, DecodeState, new_state
from dspark_jax.decoding.words import fold_seeds, round_words
from dspark_jax.models import family
from dspark_jax.models.params import Tree, is_stacked
from dspark_jax.scheduling.cost_model import Costs, table_of
from dspark_jax.scheduling.policy import Policy
from dspark_jax.settings import Buckets, SamplingParams
from dspark_jax.spec import Spec


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "lengths", "finish", "logprobs", "counters"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TokensOut:
    """Result of `generate_tokens`.

    Attributes:
      tokens: int32[B, max_new_tokens]. Emitted tokens, -1 behind them.
      lengths: int32[B]. How many.
      finish: int32[B]. Index into `FINISH_REASONS`.
      logprobs: float32[B, max_new_tokens], 0 behind the tokens; None unless asked
        for.
      counters: statistics of each request.
    """

    tokens: jax.Array
    lengths: jax.Array
    finish: jax.Array
    logprobs: jax.Array | None
    counters: Counters


def generate_tokens(
    spec: Spec,
    params: Tree,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    seeds: Any = 0,
    max_new_tokens: int,
    draft_length: int | None = None,
    policy: Policy | None = None,
    costs: Costs | None = None,
    sampling: SamplingParams | None = None,
    requests: Requests | None = None,
    variant: Variant | None = None,
    verification: str = "exact",
    capacity: int | None = None,
    logprobs: bool = False,
    allowed: jax.Array | None = None,
    shapes: Shapes | None = None,
) -> TokensOut:
    """Generates in one program: prefill, then a loop of rounds on the device.

    Jittable: close over `spec` or make it static; everything else that is not
    an array is static too. Use `generate` for text.

    Args:
      spec: static half of a model, `model.spec`.
      params: `{"target": ..., "draft": ...}`, plain nested dicts.
      tokens: int32[B, P]. Prompts, right-padded; what the padding holds does
        not matter.
      lengths: int32[B]. Prompt lengths, 1..P.
      seeds: an int, folded with the index of each request, or uint32[B, 2],
        one seed a request.
      max_new_tokens: at most this many tokens a request.
      draft_length: drafts a round, 0..gamma; None is the draft's usual number, 0
        decodes plainly.
      policy: how many of them each request verifies; None is all. Decided in the
        program, round by round, from confidences and costs.
      costs: measured times, for policies that weigh them; see `profile`.
      sampling: settings of all requests; default greedy, ending at the model's
        stop ids.
      requests: settings by request instead, see `pack_requests`; needs
        `variant`, which is static.
      variant: "greedy", "sampled" or "filtered", or with shared noise "noisy" or
        "noisy_filtered"; see `variant_of`.
      verification: "exact" or "shared_noise", see `stream`; a `variant` says it by
        itself.
      capacity: positions a request may commit; default P + max_new_tokens.
      logprobs: whether to return log-probabilities of the emitted tokens, under the
        target's law at temperature 1 without filters and without `allowed`.
      allowed: bool[B, V]. Tokens that each request may emit, from the first to the
        last; a request needs a stop id among them to end before its budget. The
        text has the law of the target so masked. A request that is allowed nothing
        of what the target may say emits -1. What may follow depends on the text: see
        `matchers` of `stream`.
      shapes: sizes to keep to, for the same text in every batch and under every
        policy; see `deterministic_shapes`. The batch must be padded to theirs.

    Returns:
      TokensOut.

    Raises:
      ValueError: shapes, dtypes or settings that do not fit, before tracing.

    Example:
      >>> import dspark_jax as dspark
      >>> model = dspark.testing.tiny_model()
      >>> tokens = np.asarray([[97, 98, 0], [97, 98, 99]], np.int32)
      >>> lengths = np.asarray([2, 3], np.int32)
      >>> @jax.jit
      ... def rollout(params, tokens, lengths):
      ...     return dspark.generate_tokens(
      ...         model.spec, params, tokens, lengths, max_new_tokens=4, draft_length=0
      ...     )
      >>> out = rollout(model.params, tokens, lengths)
      >>> out.tokens.shape, out.lengths.tolist()
      ((2, 4), [4, 4])
    """
    n, scheduled = policy_length(spec, policy, draft_length)
    batch, prompt = _check_prompts(tokens, lengths)
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"`max_new_tokens` is {max_new_tokens!r}; allowed: int >= 1")
    spec.check_params(params)
    if allowed is not None:
        _check_allowed(allowed, batch, spec.target.vocab_size)
    shared = check_verification(verification)
    if requests is None:
        sampling = sampling or SamplingParams()
        variant = variant or variant_of([sampling], shared)
        requests = pack_requests(
            [dataclasses.replace(sampling, seed=None)] * batch,
            np.zeros((batch, 2), np.uint32),
            spec.target.eos_ids,
        )
        if sampling.seed is not None:
            seeds = sampling.seed
        requests = dataclasses.replace(requests, seeds=_seed_array(seeds, batch))
    elif variant is None:
        names = ", ".join(get_args(Variant))
        raise ValueError(f"`requests` needs `variant`, one of {names}")
    if shared and variant in ("sampled", "filtered"):
        raise ValueError(
            f"`variant` is {variant!r} with verification='shared_noise'; allowed: "
            "'noisy', 'noisy_filtered', 'greedy'"
        )

    if shapes is not None:
        if batch != shapes.batch or (capacity or shapes.capacity) != shapes.capacity:
            raise ValueError(
                f"`shapes` is {shapes}, but the batch is {batch} and `capacity` is "
                f"{capacity}; pad the prompts, and leave `capacity` out"
            )
        check_deterministic(scheduled, variant)
        capacity = shapes.capacity
    plan = None
    if scheduled is not None:
        if costs is not None:
            costs = table_of(costs, batch)
        rows = shapes and shapes.rows
        plan = make_plan(spec, scheduled, batch, n, costs, variant, rows)
        check_seeds(scheduled, variant, requests.seeds)
    capacity = capacity or prompt + max_new_tokens
    if capacity < prompt:
        raise ValueError(f"`capacity` is {capacity}; allowed: at least {prompt}")
    chunks, chunk = _chunks(spec, prompt, capacity, shapes)
    state = new_state(spec, batch, capacity, n, is_stacked(params["target"]))
    state = dataclasses.replace(
        state, budget=jnp.full((batch,), max_new_tokens, jnp.int32)
    )
    state, logits = _feed_all(spec, params, state, tokens, lengths, chunks, chunk)
    noisy, extras = is_noisy(variant), Extras(logprobs=logprobs)
    words = round_words(requests.seeds, state.length, n, noisy)
    first_mask = masks = None
    if allowed is not None:
        first_mask = packed_in_program(allowed)
        masks = jnp.repeat(first_mask[:, None], n + 1, axis=1)
    state, first = begin(
        spec, params, state, logits, requests, words, n, variant, extras, first_mask
    )

    if scheduled is not None:
        state = with_memory(spec, scheduled, state, requests)
    wide = max_new_tokens + n + 1
    emitted = jnp.full((batch, wide), -1, jnp.int32)
    scores = jnp.zeros((batch, wide), jnp.float32) if logprobs else None
    zero = jnp.zeros((batch,), jnp.int32)
    emitted, scores, count = _append(emitted, scores, zero, first)

    bucket = shapes and shapes.rows[-1]

    def running(carry: tuple) -> jax.Array:
        return jnp.any(carry[0].finish == RUNNING)

    def body(carry: tuple) -> tuple:
        state, emitted, scores, count = carry
        words = round_words(requests.seeds, state.length + 1, n, noisy)
        state, out = decode_round(
            spec,
            params,
            state,
            requests,
            words,
            n,
            variant,
            extras,
            plan,
            masks,
            bucket,
        )
        return state, *_append(emitted, scores, count, out)

    state, emitted, scores, count = jax.lax.while_loop(
        running, body, (state, emitted, scores, count)
    )
    if scores is not None:
        scores = jnp.where(emitted < 0, 0.0, scores)[:, :max_new_tokens]
    return TokensOut(
        tokens=emitted[:, :max_new_tokens],
        lengths=count,
        finish=state.finish,
        logprobs=scores,
        counters=state.counters,
    )


def _check_prompts(tokens: jax.Array, lengths: jax.Array) -> tuple[int, int]:
    if tokens.ndim != 2 or tokens.dtype != jnp.int32 or 0 in tokens.shape:
        raise ValueError(
            f"`tokens` is {tokens.dtype}{list(tokens.shape)}; it must be int32[B, P]"
        )
    if lengths.shape != tokens.shape[:1] or lengths.dtype != jnp.int32:
        raise ValueError(
            f"`lengths` is {lengths.dtype}{list(lengths.shape)}; it must be "
            f"int32[{tokens.shape[0]}]"
        )
    return tokens.shape[0], tokens.shape[1]


def _check_allowed(allowed: jax.Array, batch: int, vocab: int) -> None:
    if allowed.shape != (batch, vocab) or allowed.dtype != bool:
        raise ValueError(
            f"`allowed` is {allowed.dtype}{list(allowed.shape)}; it must be "
            f"bool[{batch}, {vocab}]"
        )
    if isinstance(allowed, Tracer):
        return
    empty = np.flatnonzero(~np.asarray(allowed).any(1)).tolist()
    if empty:
        raise ValueError(
            f"`allowed` has rows {empty} without a token; allow at least one in each"
        )


def _seed_array(seeds: Any, batch: int) -> jax.Array:
    if isinstance(seeds, int):
        return fold_seeds(seeds, batch)
    if seeds.shape != (batch, 2) or seeds.dtype != jnp.uint32:
        raise ValueError(
            f"`seeds` is {seeds.dtype}{list(seeds.shape)}; it must be an int or "
            f"uint32[{batch}, 2]"
        )
    return seeds


def _chunks(
    spec: Spec, prompt: int, capacity: int, shapes: Shapes | None = None
) -> tuple[int, int]:
    """How many equal chunks a prompt is fed in, and their size."""
    fit = family.target_of(spec.target).chunk_fits
    if shapes is not None:
        sizes = shapes.prefill
        most = Buckets.fit(prompt, sizes) or sizes[-1]
        for chunk in [size for size in reversed(sizes) if size <= most]:
            chunks = math.ceil(prompt / chunk)
            if fit((chunks - 1) * chunk, chunk, capacity):
                return chunks, chunk
        raise ValueError(f"no chunk of {sizes} fits a capacity of {capacity}")
    chunks = math.ceil(prompt / Buckets().prefill[-1])
    while True:
        chunk = math.ceil(prompt / chunks)
        if fit((chunks - 1) * chunk, chunk, capacity):
            return chunks, chunk
        chunks += 1


def _feed_all(
    spec: Spec,
    params: Tree,
    state: DecodeState,
    tokens: jax.Array,
    lengths: jax.Array,
    chunks: int,
    chunk: int,
) -> tuple[DecodeState, jax.Array]:
    """Feeds the prompts in equal chunks; one compiled chunk serves all."""
    batch = tokens.shape[0]
    logits = jnp.zeros((batch, spec.target.vocab_size), jnp.float32)
    tokens = jnp.pad(tokens, ((0, 0), (0, chunks * chunk - tokens.shape[1])))
    if chunks == 1:
        return feed(spec, params, state, logits, tokens, lengths)

    def step(carry: tuple, at: jax.Array):
        part = jax.lax.dynamic_slice_in_dim(tokens, at, chunk, axis=1)
        count = jnp.clip(lengths - at, 0, chunk)
        state, logits = carry
        return feed(spec, params, state, logits, part, count), None

    starts = jnp.arange(chunks, dtype=jnp.int32) * chunk
    (state, logits), _ = jax.lax.scan(step, (state, logits), starts)
    return state, logits


def _append(
    emitted: jax.Array, scores: jax.Array | None, count: jax.Array, out: RoundOut
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Writes a round's tokens behind those of earlier rounds."""

    def put(into: jax.Array, row: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(into, row, at, axis=0)

    emitted = jax.vmap(put)(emitted, out.emitted, count)
    if scores is not None and out.logprobs is not None:
        scores = jax.vmap(put)(scores, out.logprobs, count)
    return emitted, scores, count + out.n_emitted
