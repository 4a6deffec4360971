"""Policies through both drivers: the same lengths, and the text of plain decoding."""

import dataclasses
import functools
import importlib

import jax
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding import batch as batch_module
from dspark_jax.decoding.equivalence import Equivalence, Shape
from dspark_jax.decoding.host_choice import HostChoice
from dspark_jax.decoding.plans import row_buckets
from dspark_jax.decoding.programs import Programs
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel
from dspark_jax.scheduling.gate import GateConfig
from dspark_jax.scheduling.memory import NewerProposal
from dspark_jax.scheduling.policy import Budget, EarlyStop, Gate, Threshold
from dspark_jax.scheduling.round_clock import RoundClock

N, NEW = 3, 18
PROMPTS = ["ab", "hello there"]
# A step at four rows, so that a budget has something to choose.
SIZES = row_buckets(len(PROMPTS), N)
COSTS = CostModel(curve(SIZES, [10.0, 10.5, 14.0, 15.0]), draft_ms=1.0)
POLICIES = {
    "budget": Budget(),
    "early_stop": EarlyStop(),
    "threshold": Threshold(survival=0.3),
    "gate": Gate(config=GateConfig(decay=0.5)),
}
# Each compiles programs of its own.
NAMES = [
    "budget",
    *(pytest.param(n, marks=pytest.mark.slow) for n in POLICIES if n != "budget"),
]


@pytest.fixture(scope="module")
def model():
    config = dspark.testing.tiny_config(
        layers=1, hidden_size=16, num_heads=2, num_kv_heads=1
    )
    draft = dspark.testing.tiny_draft_config(config, gamma=N)
    return dspark.testing.tiny_model(target=config, draft=draft, seed=4, scale=4.0)


@pytest.fixture(scope="module")
def plain(model):
    options = dict(max_new_tokens=NEW, chat=False, draft_length=0)
    return dspark.generate(model, PROMPTS, **options)


def generate(model, policy, costs=COSTS, **options):
    return dspark.generate(
        model, PROMPTS, max_new_tokens=NEW, chat=False, policy=policy, costs=costs,
        **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def scheduled(model):
    """Results by the policy's name; programs are compiled once."""
    return functools.cache(lambda name: generate(model, POLICIES[name], trace=True))


@pytest.fixture(scope="module")
def in_one_program(model):
    """Results of `generate_tokens` by policy; programs are compiled once."""
    ids = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    lengths = np.asarray([len(row) for row in ids], np.int32)
    tokens = np.zeros((len(ids), lengths.max()), np.int32)
    for row, given in zip(tokens, ids, strict=True):
        row[: len(given)] = given

    @functools.cache
    def compiled(policy):
        @jax.jit
        def run(params, tokens, lengths, costs):
            return dspark.generate_tokens(
                model.spec, params, tokens, lengths, max_new_tokens=NEW,
                policy=policy, costs=costs, capacity=128,
            )  # fmt: skip

        return run

    def run(policy, costs=COSTS):
        table = costs.table(len(PROMPTS))
        return compiled(policy)(model.params, tokens, lengths, table)

    return run


@pytest.mark.parametrize("name", NAMES)
def test_text_is_that_of_plain_decoding(name, plain, scheduled):
    results = scheduled(name)
    for have, want in zip(results, plain, strict=True):
        assert have.tokens == want.tokens
    lengths = {log.drafted for one in results for log in one.rounds}
    assert len(lengths) > 1, "the policy never chose"


@pytest.mark.parametrize("name", NAMES)
def test_both_drivers_decide_alike(name, in_one_program, scheduled):
    agree(in_one_program(POLICIES[name]), scheduled(name))


def agree(out, results):
    for row, one in enumerate(results):
        assert out.tokens[row, : out.lengths[row]].tolist() == one.tokens
        assert int(out.counters.rounds[row]) == one.stats.rounds
        assert int(out.counters.drafted[row]) == one.stats.drafted
        assert int(out.counters.verified_rows[row]) == one.stats.verified_rows


def test_a_budget_goes_without_proposals_where_they_do_not_pay(
    model, plain, in_one_program
):
    dear = CostModel(curve(SIZES, [10.0, 10.5, 11.0, 11.5]), draft_ms=30.0)
    results = generate(model, Budget(), dear, trace=True)
    agree(in_one_program(Budget(), dear), results)
    for have, want in zip(results, plain, strict=True):
        assert have.tokens == want.tokens
        drafted = [log.drafted for log in have.rounds]
        # Nothing is known of drafts at first; then most rounds have none to verify.
        assert drafted[0] > 0 and drafted.count(0) > len(drafted) // 2
    # Control: what drafts cost is what decides.
    free = CostModel(curve(SIZES, [10.0, 10.5, 11.0, 11.5]), draft_ms=0.0)
    for have in generate(model, Budget(), free, trace=True):
        drafted = [log.drafted for log in have.rounds]
        assert drafted.count(0) <= len(drafted) // 2


def test_statistics_count_what_was_verified(scheduled):
    for one in scheduled("budget"):
        assert one.stats.drafted == sum(log.drafted for log in one.rounds)
        assert one.stats.verified_rows == one.stats.drafted + one.stats.rounds
        for log in one.rounds:
            assert log.accepted <= log.drafted == len(log.confidence)


def test_a_total_from_the_waiting_proposal_is_refused(model, monkeypatch):
    """As if rounds handed out what they will verify next."""
    real = HostChoice.add

    def early(self, number, offer):
        later = dataclasses.replace(offer, generation=offer.generation + 99)
        real(self, number, later)

    monkeypatch.setattr(HostChoice, "add", early)
    with pytest.raises(NewerProposal, match="only older ones"):
        generate(model, Budget())


def test_the_host_never_waits_for_the_round_it_schedules(model, monkeypatch):
    """When a round is launched, the one before it may still be in flight."""
    seen, real = [], batch_module.Batch.launch

    def launch(self):
        seen.append(len(self._flights))
        real(self)

    monkeypatch.setattr(batch_module.Batch, "launch", launch)
    generate(model, Budget())
    # Near its end a request may have no use for another round.
    assert seen[:2] == [0, 1] and seen.count(1) > 0.7 * len(seen)


def test_profile_times_the_programs_that_serve(model, tmp_path, monkeypatch):
    options = dict(batch=len(PROMPTS), capacity=128, cache=tmp_path / "costs.json")
    costs = dspark.profile(model, **options)
    assert costs.curve.sizes.tolist() == list(SIZES)
    assert (np.asarray(costs.curve.ms) > 0).all() and costs.draft_ms >= 0
    # Every row count has run, so that serving compiles nothing but the prompt's chunk.
    rounds = {key for key in model.programs.keys if key[0] == "round"}
    generate(model, Budget())
    assert {key for key in model.programs.keys if key[0] == "round"} == rounds

    def never(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(
        importlib.import_module("dspark_jax.profile"), "_measure", never
    )
    again = dspark.profile(model, **options)
    assert again.curve.ms.tolist() == costs.curve.ms.tolist()
    assert again.draft_ms == costs.draft_ms
    with pytest.raises(AssertionError, match="measured again"):
        dspark.profile(model, **{**options, "batch": 1})
    with pytest.raises(ValueError, match="draft_length"):
        dspark.profile(model, draft_length=0)


def test_a_deterministic_policy_keeps_to_one_group(model, plain, monkeypatch):
    """As if rounds of two rows had been found to give other bits."""
    known = Equivalence(model.spec, model.params, inputs=1)
    alike = [Shape("round", 2, rows, 128) for rows in SIZES[1:]]
    alike += [Shape("prefill", 2, size, 128) for size in dspark.Buckets().prefill]
    alike += [known.reference("round"), known.reference("prefill")]
    known.digests = {shape: ("same",) for shape in alike}
    known.digests[Shape("round", 2, SIZES[0], 128)] = ("other",)
    monkeypatch.setattr(model.programs, "equivalence", known)
    seen, real = set(), Programs.round

    def noted(self, *args):
        seen.add(args[5].buckets)
        return real(self, *args)

    monkeypatch.setattr(Programs, "round", noted)
    results = generate(model, Budget(), deterministic=True, trace=True)
    assert [one.tokens for one in results] == [one.tokens for one in plain]
    assert len({log.drafted for one in results for log in one.rounds}) > 1
    assert len(seen) > 1 and SIZES[:1] not in seen
    sampled = dspark.SamplingParams(temperature=1.0)
    with pytest.raises(ValueError, match="deterministic.*shared_noise"):
        generate(model, Budget(), deterministic=True, sampling=sampled)


def test_bad_policies(model):
    with pytest.raises(ValueError, match="policy.*allowed"):
        dspark.generate(model, "a", policy=3)
    with pytest.raises(ValueError, match="costs"):
        dspark.generate(model, "a", policy=Budget())
    with pytest.raises(ValueError, match="draft_length"):
        dspark.generate(model, "a", policy=Budget(draft_length=2), draft_length=1)
    with pytest.raises(ValueError, match="draft_length"):
        Budget(draft_length=0)
    with pytest.raises(ValueError, match="survival"):
        Threshold(survival=1.5)
    sampling = dspark.SamplingParams(temperature=1.0)
    with pytest.raises(ValueError, match="bias"):
        generate(model, Gate(causal=False), sampling=sampling)
    twins = [dspark.SamplingParams(temperature=1.0, seed=7)] * 2
    with pytest.raises(ValueError, match="seeds"):
        generate(model, Budget(), sampling=twins)
    silent = dataclasses.replace(
        model.spec.draft, confidence=False, confidence_with_markov=False
    )
    without = dataclasses.replace(model.spec, draft=silent)
    with pytest.raises(ValueError, match="confidence head"):
        dspark.generate(dataclasses.replace(model, spec=without), "a", policy=Budget())


@pytest.fixture
def told(monkeypatch):
    """What rounds report, as if every result were late and every round took 7 ms."""
    facts = []
    monkeypatch.setattr(
        CostModel, "observe_round", lambda self, **fact: facts.append(fact)
    )
    monkeypatch.setattr(RoundClock, "received", lambda self, was_there: 7.0)
    return facts


FOLLOWS = CostModel(curve(SIZES, [10.0, 10.5, 14.0, 15.0]), draft_ms=1.0, follows=True)


def test_costs_follow_the_rounds(model, told):
    results = generate(model, Budget(), FOLLOWS)
    rounds = max(one.stats.rounds for one in results)
    assert len(told) == rounds
    assert all(1 <= one["rows"] <= SIZES[-1] for one in told)
    # Each is told what it was to do: the last of them verify what is left.
    assert len({one["rows"] for one in told}) > 1
    assert told[0]["requests"] == 2 and told[0]["round_ms"] == 7.0
    told.clear()
    # A model that does not ask for it, and a table of one moment.
    generate(model, Budget())
    generate(model, Budget(), FOLLOWS.table(len(PROMPTS)))
    assert told == []


@pytest.mark.slow
def test_costs_do_not_follow_where_text_would_depend_on_them(model, told):
    drawn = dspark.SamplingParams(temperature=1.0, seed=1)
    generate(model, Budget(), FOLLOWS, sampling=drawn)
    assert told == []
