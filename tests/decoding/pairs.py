"""Joint laws of two requests that share a round's rows, by enumeration."""

import collections

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax as dspark
from dspark_jax.decoding.words import RoundWords
from tests.decoding.enumeration import PROMPT, completed, midpoints, program

# Pairs that are evaluated together.
BATCH = 4096


def enumerate_pairs(model, n, rounds, parts, plan, prompts=(1, 1)):
    """Law of what two requests emit, as {(tokens, tokens): probability}.

    Every word of both requests is tried: each request has words of its own.

    Args:
      model: scripted, with confidences.
      n: drafts a round.
      rounds: rounds after the prefill.
      parts: points of every word.
      plan: of the rounds.
      prompts: the token that each prompt consists of.
    """
    run = program(model, n, rounds, plan, together=2)
    # As `enumerate_law` for each request.
    each = 1 + n + rounds + n * (rounds - 1)
    axes = [parts] * (2 * each)
    total = int(np.prod(axes))
    size = min(BATCH, total)
    tokens = np.tile(
        np.repeat(np.asarray(prompts, np.int32)[:, None], PROMPT, 1), (size, 1)
    )
    one = dspark.pack_requests(
        [dspark.SamplingParams(temperature=1.0)], np.zeros((1, 2), np.uint32), ()
    )
    requests = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (2 * size, *x.shape[1:])), one
    )
    law = collections.Counter()
    for begin in range(0, total, size):
        count = min(size, total - begin)
        # Cases past the end repeat the last one and are not counted.
        cases = np.minimum(np.arange(begin, begin + size), total - 1)
        digits = np.stack(np.unravel_index(cases, axes), 1)
        # One row a request; a case's two requests are neighbours.
        columns = iter(midpoints(parts)[digits.reshape(2 * size, each)].T)

        def take(wide, columns=columns):
            chosen = [next(columns) for _ in range(wide)]
            return np.stack(chosen, 1) if chosen else np.zeros((2 * size, 0), np.uint32)

        def words(fresh, drafts):
            return RoundWords(
                fresh=np.repeat(fresh, n + 1, 1),
                draft=np.repeat(drafts[:, None], n + 2, 1),
            )

        none = np.zeros((2 * size, n), np.uint32)
        first = words(take(1), take(n))
        later = [
            words(take(1), take(n) if r + 1 < rounds else none) for r in range(rounds)
        ]
        emitted, _ = run(model.params, jnp.asarray(tokens), requests, first, later)
        lines = np.concatenate([np.asarray(x) for x in emitted], 1)
        lines = lines.reshape(size, 2, -1)[:count]
        for pair, times in zip(
            *np.unique(lines, axis=0, return_counts=True), strict=True
        ):
            both = tuple(tuple(int(t) for t in row if t >= 0) for row in pair)
            law[both] += int(times) / total
    return law


def completed_pairs(law, target, length):
    """`law` with each request continued by the target.

    Returns:
      float64[V^length, V^length], both requests' sequences in lexical order.
    """
    found = [sorted({pair[row] for pair in law}) for row in (0, 1)]
    place = [{tokens: i for i, tokens in enumerate(seen)} for seen in found]
    joint = np.zeros([len(seen) for seen in found])
    for (a, b), mass in law.items():
        joint[place[0][a], place[1][b]] += mass
    ends = [
        np.stack([completed({one: 1.0}, target, length).reshape(-1) for one in seen])
        for seen in found
    ]
    return ends[0].T @ joint @ ends[1]
