"""Laws of emitted text by enumeration of every random word of the serving code."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax as dspark
from dspark_jax.decoding.requests import Requests
from dspark_jax.decoding.schedule import with_memory
from dspark_jax.decoding.words import RoundWords
from tests.decoding.serving import decode_round, prefill
from tests.models.quick import quick_jit

# Rows that are evaluated together.
BATCH = 8640
PROMPT = 2


def midpoints(count):
    """uint32[count]: words in the middle of equal parts of the unit interval."""
    return ((np.arange(count) + 0.5) / count * 2**32).astype(np.uint32)


def program(model, n, rounds, plan=None, learned=None, capacity=16, together=1):
    """Prefill and rounds in one program; a fresh one, as controls patch it.

    With a plan every case is a batch of its own, as policies let requests share rows;
    `together` neighbouring rows are one case.
    """

    def run(params, tokens, requests, first, later):
        batch = tokens.shape[0]
        lengths = jnp.full((batch,), PROMPT, jnp.int32)
        budget = jnp.full((batch,), 99, jnp.int32)
        state, out = prefill(
            model.spec, params, tokens, lengths, budget, requests, first, n,
            "sampled", capacity,
        )  # fmt: skip
        emitted, counts = [out.emitted], [out.n_emitted]
        if plan is not None:
            state = with_memory(model.spec, plan.policy, state, requests)
        if learned is not None:
            memory = dataclasses.replace(state.memory, gate=learned)
            state = dataclasses.replace(state, memory=memory)
        for words in later:
            state, out = decode_round(
                model.spec, params, state, requests, words, n, "sampled", plan=plan
            )
            emitted.append(out.emitted)
            counts.append(out.n_emitted)
        return emitted, counts

    if plan is None:
        return quick_jit(run)

    def each(params, *cases):
        batches = jax.tree.map(lambda x: x.reshape(-1, together, *x.shape[1:]), cases)
        out = jax.vmap(functools.partial(run, params))(*batches)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)

    return quick_jit(each)


def enumerate_law(model, n, rounds, parts, temperature=1.0, plan=None, learned=None):
    """Law of the emitted sequences, as {tokens: probability}.

    Args:
      model: scripted.
      n: drafts a round.
      rounds: rounds after the prefill.
      parts: points of every word.
      temperature: of every request.
      plan: of the rounds; None verifies all drafts.
      learned: a gate's counts before the first round.
    """
    run = program(model, n, rounds, plan, learned)
    # First token and first proposal; then a fresh token a round, and a proposal but
    # after the last one.
    axes = [parts] * (1 + n + rounds + n * (rounds - 1))
    total = int(np.prod(axes))
    law = collections.Counter()
    size = min(BATCH, total)
    tokens = jnp.full((size, PROMPT), 1, jnp.int32)
    sampling = dspark.SamplingParams(temperature=temperature)
    one = dspark.pack_requests([sampling], np.zeros((1, 2), np.uint32), ())
    requests: Requests = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (size, *x.shape[1:])), one
    )
    for begin in range(0, total, size):
        cases = np.arange(begin, min(begin + size, total))
        # Rows past the end repeat the last case and are not counted.
        padded = np.minimum(np.arange(begin, begin + size), total - 1)
        columns = iter(np.unravel_index(padded, axes))

        def take(count, columns=columns):
            chosen = [midpoints(parts)[next(columns)] for _ in range(count)]
            return np.stack(chosen, 1) if chosen else np.zeros((size, 0), np.uint32)

        def words(fresh, drafts):
            return RoundWords(
                fresh=np.repeat(fresh, n + 1, 1),
                draft=np.repeat(drafts[:, None], n + 2, 1),
            )

        none = np.zeros((size, n), np.uint32)
        first = words(take(1), take(n))
        later = [
            words(take(1), take(n) if r + 1 < rounds else none) for r in range(rounds)
        ]
        emitted, counts = run(model.params, tokens, requests, first, later)
        line = np.concatenate([np.asarray(x) for x in emitted], 1)[: len(cases)]
        assert all((np.asarray(c) >= 1).all() for c in counts)
        for row, times in zip(
            *np.unique(line, axis=0, return_counts=True), strict=True
        ):
            law[tuple(int(t) for t in row if t >= 0)] += int(times) / total
    return law


def completed(law, target, length):
    """`law` with shorter sequences continued by the target, as an array."""
    out = np.zeros((len(target),) * length)
    for tokens, mass in law.items():
        for tail in itertools.product(range(len(target)), repeat=length - len(tokens)):
            line = [*tokens, *tail]
            share = mass
            for at in range(len(tokens), length):
                share *= target[line[at - 1], line[at]]
            out[tuple(line)] += share
    return out


def chain(target, length, after=1):
    """Law of the target's own sequences after a token."""
    return completed({(t,): p for t, p in enumerate(target[after])}, target, length)
