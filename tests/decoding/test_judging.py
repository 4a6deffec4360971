"""Row counts chosen at run time, and what a proposal may promise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding import schedule
from dspark_jax.decoding.judging import Judged, judge_in_buckets
from dspark_jax.decoding.plans import row_buckets
from dspark_jax.decoding.schedule import offered
from dspark_jax.decoding.state import STOP, new_state
from dspark_jax.models.draft.proposal import Proposal
from dspark_jax.models.rows import packed_rows
from dspark_jax.scheduling import decide
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel
from dspark_jax.scheduling.memory import Offer
from pallas_kernels.verify import VerifiedRows
from tests.decoding.serving import requests_for

BUCKETS = (2, 4, 7)


def evaluated(count):
    """Rows in the program that `count` real rows run in, seen in its results."""
    tokens = jnp.ones((1, 7), jnp.int32)
    lengths = jnp.full((1,), count, jnp.int32)
    rows = packed_rows(tokens, lengths, jnp.zeros(1, jnp.int32), 7, BUCKETS[-1])

    def one(rows, is_verify):
        size = len(rows.token)
        assert is_verify.shape == (size,)
        mark = jnp.full((size,), size, jnp.int32)
        verdict = VerifiedRows(is_verify, mark, mark.astype(jnp.float32))
        features = jnp.ones((size, 3), jnp.float32)
        return Judged(verdict, None, None, features, {})

    is_verify = rows.is_real & (rows.local_step < count - 1)
    out = judge_in_buckets(BUCKETS, lengths.sum(), rows, is_verify, one)
    assert out.verdict.token.shape == (7,) and out.features.shape == (7, 3)
    size = int(out.verdict.token[0])
    # Behind the program's rows there is nothing.
    assert out.verdict.token.tolist() == [size] * size + [0] * (7 - size)
    assert out.verdict.accept.tolist() == [g < count - 1 for g in range(7)]
    return size


@pytest.mark.parametrize(
    ("count", "size"), [(1, 2), (2, 2), (3, 4), (4, 4), (5, 7), (7, 7)]
)
def test_the_smallest_bucket_that_holds_all(count, size):
    assert evaluated(count) == size


@pytest.mark.parametrize("beside", [True, False])
def test_the_host_chooses_while_a_round_is_in_flight(beside):
    """Control: as a program, the choice waits for the round that runs."""

    @jax.jit
    def program(offer, costs, rounds):
        return decide.total_of(offer, costs), decide.draft_pays(offer, costs, rounds)

    def as_program(offer, costs, rounds):
        total, drafts = program(offer, costs, np.int32(rounds))
        return int(total), bool(drafts)

    choose = schedule.choose_on_host if beside else as_program
    half = np.full((1, 3), 0.5, np.float32)
    offer = Offer(half, half, np.ones(1, bool), np.ones(1, np.int32), half)
    costs = CostModel(curve([2, 3, 4], [10.0, 11.0, 12.0])).table(1)
    chosen = choose(offer, costs, 3)

    @jax.jit
    def long(x):
        return jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ x), x)

    x = jnp.ones((1024, 1024), jnp.float32) / 1024
    long(x).block_until_ready()
    flight = long(x)
    assert choose(offer, costs, 3) == chosen
    assert flight.is_ready() is not beside
    flight.block_until_ready()


def test_row_buckets():
    assert row_buckets(1, 5) == (2, 3, 4, 5, 6)
    assert row_buckets(4, 2) == (4, 8, 12)
    assert row_buckets(1, 1) == (2,)


def test_what_cannot_be_emitted_promises_nothing():
    target = dspark.testing.tiny_config("qwen3")
    draft = dspark.testing.tiny_draft_config(target, gamma=3)
    spec = dspark.Spec(target, draft)
    state = new_state(spec, 5, 32, 3, stacked=False)
    state = dataclasses.replace(
        state,
        # m tokens left: m - 1 drafts, as the target itself adds one. The anchor
        # stands at `length`; positions up to 31 may be committed.
        budget=jnp.asarray([9, 3, 1, 9, 9], jnp.int32),
        length=jnp.asarray([4, 4, 4, 29, 4], jnp.int32),
        finish=jnp.asarray([0, 0, 0, 0, STOP], jnp.int32),
    )
    logits = jnp.broadcast_to(jnp.asarray([[0.0, 1.0, -1.0]], jnp.float32), (5, 3))
    logits = logits.at[0, 1].set(jnp.nan)
    ids = jnp.zeros((5, 3), jnp.int32)
    proposal = Proposal(ids, None, None, logits, state.length + 1)
    greedy = dspark.SamplingParams()
    requests = requests_for(*[greedy] * 5)
    offer = offered(spec, state, proposal, requests)
    chances = np.asarray(jax.nn.sigmoid(jnp.asarray([0.0, 1.0, -1.0])))
    whole = np.cumprod(chances)
    wanted = [
        [whole[0], 0.0, 0.0],
        [whole[0], whole[1], 0.0],
        [0.0, 0.0, 0.0],
        [whole[0], 0.0, 0.0],
        [0.0, 0.0, 0.0],
    ]
    np.testing.assert_allclose(offer.values, wanted, rtol=1e-6)
    assert offer.live.tolist() == [True] * 4 + [False]
    assert offer.generation.tolist() == [5, 5, 5, 30, 5]

    # A calibration for greedy decoding says nothing about requests that draw.
    warm = dataclasses.replace(
        draft, confidence_temperatures=(2.0, 2.0, 1.0), calibrated_at=0.0
    )
    drawn = dspark.SamplingParams(temperature=1.0)
    for at, one, first in (
        (0.0, greedy, True),
        (0.0, drawn, False),
        (1.0, greedy, False),
        (1.0, drawn, True),
    ):
        config = dataclasses.replace(warm, calibrated_at=at)
        offer = offered(
            dspark.Spec(target, config), state, proposal, requests_for(*[one] * 5)
        )
        second = jax.nn.sigmoid(jnp.float32(0.5)) if first else chances[1]
        np.testing.assert_allclose(offer.values[1, 1], 0.5 * second, rtol=1e-6)
