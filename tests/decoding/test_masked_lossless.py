"""The law of what is emitted under masks, by enumeration of every random word.

Prefill and rounds are the serving code, the masks between them come from the host's
walk, and the requests of a batch are all the cases there are.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.matching import Guide
from dspark_jax.decoding.plans import row_buckets
from dspark_jax.decoding.prefill import begin, feed
from dspark_jax.decoding.round import decode_round
from dspark_jax.decoding.schedule import Plan, with_memory
from dspark_jax.decoding.state import new_state
from dspark_jax.decoding.words import RoundWords
from dspark_jax.scheduling.policy import Threshold
from tests.decoding.automata import Automaton, Counting, distance
from tests.decoding.enumeration import midpoints
from tests.models.quick import quick_jit

TABLES = (
    np.asarray([[1, 2, 3], [3, 3, 0], [2, 2, 2]]) / 6,
    np.asarray([[3, 2, 1], [2, 1, 3], [3, 3, 0]]) / 6,
)
# More than the last token decides what may follow: after 0 all are allowed if that 0
# was forced, and only two if not. All laws that it leaves are sixths.
GRAMMAR = Automaton({0: {0: 1, 1: 0, 2: 0}, 1: {0: 1, 1: 2}, 2: {0: 0}}, vocab=3)
CONFIDENCE = np.asarray([-2.0, 2.0, 0.2], np.float32)
PARTS, PROMPT, CAPACITY = 6, 2, 16


THRESHOLD = Threshold(survival=0.5)


@functools.cache
def model(n):
    with np.errstate(divide="ignore"):
        logs = [np.log(table) for table in TABLES]
    return dspark.testing.scripted_model(*logs, gamma=max(n, 1), confidence=CONFIDENCE)


@functools.cache
def first_program(n, batch):
    """Prompt and first token, compiled."""
    one = model(n)

    def start(params, requests, words, masks):
        state = new_state(one.spec, batch, CAPACITY, n, stacked=False)
        state = dataclasses.replace(state, budget=jnp.full((batch,), 99, jnp.int32))
        logits = jnp.zeros((batch, 3), jnp.float32)
        tokens = jnp.ones((batch, PROMPT), jnp.int32)
        lengths = jnp.full((batch,), PROMPT, jnp.int32)
        state, logits = feed(one.spec, params, state, logits, tokens, lengths)
        state, out = begin(
            one.spec, params, state, logits, requests, words, n, "sampled", masks=masks
        )
        # Rounds of fixed length take no notice of it.
        return (with_memory(one.spec, THRESHOLD, state, requests) if n else state), out

    return quick_jit(start)


@functools.cache
def round_program(n, batch, policy):
    """A round, compiled."""
    one = model(n)
    plan = None
    if policy is not None:
        plan = Plan(None, None, policy, row_buckets(batch, n))

    def go_on(params, state, requests, words, masks):
        return decode_round(
            one.spec, params, state, requests, words, n, "sampled", plan=plan,
            masks=masks,
        )  # fmt: skip

    return quick_jit(go_on)


def masked_law(n, rounds, policy=None, spoil=lambda masks: masks):
    """Law of the emitted texts, and the lengths that were verified."""
    axes = [PARTS] * (1 + n + rounds + n * (rounds - 1))
    batch = int(np.prod(axes))
    columns = iter(np.unravel_index(np.arange(batch), axes))

    def take(count):
        chosen = [midpoints(PARTS)[next(columns)] for _ in range(count)]
        return np.stack(chosen, 1) if chosen else np.zeros((batch, 0), np.uint32)

    def words(fresh, drafts):
        return RoundWords(
            fresh=np.repeat(fresh, n + 1, 1), draft=np.repeat(drafts[:, None], n + 2, 1)
        )

    params = model(n).params
    start, go_on = first_program(n, batch), round_program(n, batch, policy)
    sampling = dspark.SamplingParams(temperature=1.0)
    packed = dspark.pack_requests([sampling], np.zeros((1, 2), np.uint32), ())
    requests = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), packed
    )
    matchers = [Counting(GRAMMAR) for _ in range(batch)]
    guide = Guide(matchers, [()] * batch, batch, 3, n)
    state, out = start(params, requests, words(take(1), take(n)), guide.first())
    texts = [[] for _ in range(batch)]
    drafted, broken = set(), set()

    def read(out):
        lines = [
            row[:count]
            for row, count in zip(
                out.emitted.tolist(), out.n_emitted.tolist(), strict=True
            )
        ]
        for row, line in enumerate(lines):
            texts[row] += line
            if row not in broken and not GRAMMAR.accepts(texts[row]):
                broken.add(row)
                # What a spoiled mask let through no matcher follows.
                guide._matchers[row] = None
        guide.take(lines)

    read(out)
    for round_ in range(rounds):
        proposed = [[]] * batch if n == 0 else state.proposal.ids.tolist()
        masks = spoil(guide.masks(proposed, [True] * batch))
        fresh, drafts = take(1), take(n if round_ + 1 < rounds else 0)
        if drafts.shape[1] < n:
            drafts = np.zeros((batch, n), np.uint32)
        state, out = go_on(params, state, requests, words(fresh, drafts), masks)
        drafted |= set(out.n_drafts.tolist())
        read(out)
    law = collections.Counter()
    for text in texts:
        law[tuple(text)] += 1 / batch
    return law, drafted


def error(n, rounds, policy=None, spoil=lambda masks: masks):
    law, _ = masked_law(n, rounds, policy, spoil)
    return distance(law, TABLES[0], GRAMMAR)


@pytest.mark.parametrize(
    ("n", "rounds"),
    [
        (2, 1),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in [(0, 2), (1, 1), (1, 2)]),
    ],
)
def test_emitted_law_is_the_masked_targets(n, rounds):
    law, _ = masked_law(n, rounds)
    assert abs(sum(law.values()) - 1) < 1e-9
    assert {len(text) for text in law} == set(range(1 + rounds, 2 + rounds * (n + 1)))
    assert all(GRAMMAR.accepts(text) for text in law)
    assert distance(law, TABLES[0], GRAMMAR) < 1e-9


def later(masks):
    """Every row the mask of the row before it."""
    return np.concatenate([masks[:, :1], masks[:, :-1]], 1)


def earlier(masks):
    """Every row the mask of the row behind it."""
    return np.concatenate([masks[:, 1:], masks[:, -1:]], 1)


def first_only(masks):
    """Drafts judged by the mask, what stands for them drawn without."""
    return np.concatenate([masks[:, :1], np.full_like(masks[:, 1:], 2**32 - 1)], 1)


@pytest.mark.parametrize("spoil", [later, earlier, first_only])
def test_control_masks_on_other_rows(spoil):
    assert error(2, 1, spoil=spoil) > 1e-2


def test_packed_rows_get_their_own_masks():
    """Requests that verify none, one or two drafts share the rows of a round."""
    law, drafted = masked_law(2, 1, THRESHOLD)
    assert drafted == {0, 1, 2}
    assert distance(law, TABLES[0], GRAMMAR) < 1e-9
    assert error(2, 1, THRESHOLD, later) > 1e-2


def nothing(masks):
    return np.zeros_like(masks)


def test_a_row_that_allows_nothing_gives_no_token():
    law, _ = masked_law(2, 1, spoil=nothing)
    # The first token had a mask of its own.
    assert all(text[1:] == (-1,) for text in law)
