"""How many programs are compiled under policies, and when."""

import dataclasses
import functools

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax import SamplingParams
from dspark_jax.decoding.plans import row_buckets
from dspark_jax.decoding.programs import Programs
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel
from dspark_jax.scheduling.policy import Budget, EarlyStop, Gate
from tests.engine.test_compiles import calls

N = 2
# Rows of one request and of eight. The steps make totals that differ.
SIZES = sorted({*row_buckets(1, N), *row_buckets(8, N)})
MS = {2: 10.0, 3: 11.5, 8: 13.0, 16: 24.0, 24: 30.0}
POLICIES = {"budget": Budget(), "gate": Gate(), "early_stop": EarlyStop()}


def costs(**changes):
    model = CostModel(curve(SIZES, [MS[size] for size in SIZES]), draft_ms=1.0)
    return dataclasses.replace(model.table(8), **changes)


@pytest.fixture
def rounds(monkeypatch):
    """Row counts of the rounds that ran."""
    seen, real = [], Programs.round

    def noted(self, *args):
        # Profiling and plain decoding have no plan.
        if len(args) > 5 and args[5] is not None:
            seen.append(args[5].buckets)
        return real(self, *args)

    monkeypatch.setattr(Programs, "round", noted)
    return seen


def generate(model, policy, prompts, **options):
    settings = dict(max_new_tokens=5, chat=False, costs=costs()) | options
    return dspark.generate(model, prompts, policy=policy, **settings)


def warm_up(model, policy, sizes):
    """What is compiled before any request is served."""
    for batch in sizes:
        if isinstance(policy, Budget):
            # Rounds of every row count, with the programs that serve.
            dspark.profile(model, batch=batch, draft_length=N, capacity=128)
        for length in (1, 64):
            generate(model, policy, ["a" * length] * batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_fr31_no_call_compiles_after_the_warm_up(
    name, model, few_buckets, compile_counter, rounds
):
    policy = POLICIES[name]
    warm_up(model, policy, few_buckets.batch)
    before = model.programs.count
    compile_counter.restart()
    rounds.clear()
    for prompts in calls(np.random.default_rng(0), 40):
        generate(model, policy, prompts)
    assert model.programs.count == before
    assert compile_counter.programs == []
    by_batch = [row_buckets(size, N) for size in few_buckets.batch]
    if name == "budget":
        # Every row count was used, each by a program of its own.
        assert set(rounds) == {(rows,) for sizes in by_batch for rows in sizes}
    else:
        assert set(rounds) == set(by_batch)


def test_fr31_later_costs_need_no_program(model, compile_counter):
    """A cost model moves while it serves; its shapes do not."""
    generate(model, Budget(), "ab")
    dspark.profile(model, draft_length=N, capacity=128)
    before = model.programs.count
    compile_counter.restart()
    drafted = []
    for ms in ([10.0, 10.1], [10.0, 90.0]):
        moved = costs(curve=curve([2, 3], ms), slope=np.float32(ms[0] / 100))
        drafted.append(generate(model, Budget(), "ab", costs=moved).stats.drafted)
    # Two sizes are another shape than five: one small program, on the host.
    assert model.programs.count == before
    assert len(compile_counter.programs) <= 1, compile_counter.programs
    assert drafted[0] != drafted[1]


@pytest.mark.slow
def test_fr31_the_counter_sees_a_policy_of_other_numbers(model):
    """Control: settings of a policy are static, and other ones are other programs."""
    before = model.programs.count
    for survival in (0.21, 0.22):
        policy = dspark.Threshold(survival=survival)
        dspark.generate(model, "ab", max_new_tokens=2, chat=False, policy=policy)
    assert model.programs.count >= before + 4


@pytest.mark.slow
def test_fr32_an_option_costs_a_program_a_row_count_at_most(model, compile_counter):
    policy = Budget()
    both = len(row_buckets(1, N))

    def call(**options):
        # One total and then another, so that both row counts run.
        for ms in ([10.0, 10.1], [10.0, 90.0]):
            table = costs(curve=curve([2, 3], ms))
            generate(model, policy, "ab", **{"costs": table, **options})

    warm = SamplingParams(temperature=1.0)
    call()
    prices = {
        "nothing": (dict(), 0),
        "logprobs": (dict(logprobs=True), both),
        "trace": (dict(trace=True), both),
        "temperature": (dict(sampling=warm), both),
        "seed": (dict(sampling=SamplingParams(temperature=1.0, seed=3)), 0),
        "top_k": (dict(sampling=SamplingParams(temperature=1.0, top_k=3)), both),
        "top_p": (dict(sampling=SamplingParams(temperature=1.0, top_p=0.5)), 0),
        "stop_ids": (dict(sampling=SamplingParams(stop_ids=(5, 6))), 0),
        "stop": (dict(stop=["xyz"]), 0),
        "max_new_tokens": (dict(max_new_tokens=7), 0),
    }
    for again in (False, True):
        for name, (options, most) in prices.items():
            before = model.programs.count
            compile_counter.restart()
            call(**options)
            grown = model.programs.count - before
            assert grown <= (0 if again else most), name
            if again:
                assert compile_counter.programs == [], name


@pytest.mark.slow
def test_fr33_totals_up_to_the_largest_row_count_and_beyond(model, few_buckets, rounds):
    """A full batch of whole blocks is the largest row count exactly."""
    largest = few_buckets.batch[-1]
    prompts = [f"{i}ab" for i in range(largest)]
    most = row_buckets(largest, N)[-1]
    assert most == largest * (N + 1)
    plain = [r.tokens for r in generate(model, dspark.Fixed(0), prompts, costs=None)]

    @functools.cache
    def drafted(largest_size):
        rounds.clear()
        sizes = [size for size in (8, 16) if size < largest_size] + [largest_size]
        # Rows cost nothing up to the largest size that was measured.
        flat = CostModel(curve(sizes, [10.0] * len(sizes)))
        results = generate(model, Budget(), prompts, costs=flat)
        assert [one.tokens for one in results] == plain
        return rounds[0], sum(one.stats.drafted for one in results)

    assert drafted(most)[0] == (most,)
    # One row less than whole blocks: padded to the same program.
    assert drafted(most - 1)[0] == (most,)
    assert drafted(most - 1)[1] < drafted(most)[1]
    # More requests than any size that was measured holds: a row each, no drafts.
    rows, verified = drafted(largest - 1)
    assert rows == (largest,) and verified == 0


@pytest.mark.slow
def test_fr33_one_request_past_the_largest_batch(model, few_buckets):
    largest = few_buckets.batch[-1]
    prompts = [f"{i}ab" for i in range(largest + 1)]
    more = generate(model, Budget(), prompts)
    full = generate(model, Budget(), prompts[:-1])
    # One waits for a place, and takes part in the totals from then on.
    assert [r.tokens for r in more[:-1]] == [r.tokens for r in full]
    assert more[-1].tokens == generate(model, Budget(), prompts[-1]).tokens
    few = dataclasses.replace(costs(), draft_ms=np.ones(8, np.float32))
    with pytest.raises(ValueError, match="`costs` is .a table for 7.*8 requests"):
        generate(model, Budget(), prompts, costs=few)
