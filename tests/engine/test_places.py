"""More prompts than places: requests join a running batch where others left."""

import dataclasses

import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax import Budget, EarlyStop, Gate, SamplingParams, Threshold
from dspark_jax.decoding import batch as batch_module
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel

PROMPTS = [f"{c * (1 + 5 * i)}" for i, c in enumerate("abcdefg")]
COSTS = CostModel(curve([2, 8, 16, 24], [1.0, 1.2, 1.9, 2.6]), draft_ms=0.1)
POLICIES = {
    "fixed": {},
    "plain": {"draft_length": 0},
    "budget": {"policy": Budget(), "costs": COSTS},
    "early-stop": {"policy": EarlyStop(), "costs": COSTS},
    "gate": {"policy": Gate(), "costs": COSTS},
    "threshold": {"policy": Threshold(survival=0.2)},
}
SLOW = pytest.mark.slow  # Every one compiles rounds of its own.


def generate(model, prompts, **options):
    settings = dict(max_new_tokens=20, chat=False) | options
    return dspark.generate(model, prompts, **settings)


@pytest.fixture(scope="module")
def settings(plain):
    """Some end by a stop token, at different times; the others by their budget."""
    rows = plain(PROMPTS, 20)
    ends = [row[k] for row, k in zip(rows, (3, 19, 1, 7, 19, 0, 11), strict=True)]
    stops = [() if k in (1, 4) else (end,) for k, end in enumerate(ends)]
    return [SamplingParams(stop_ids=stop, seed=40 + k) for k, stop in enumerate(stops)]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("fixed", "budget") else pytest.param(name, marks=SLOW)
        for name in POLICIES
    ],
)
def test_text_does_not_depend_on_neighbours(model, settings, name):
    """Greedy: two places or one or all at once, in any order of arrival."""
    options = POLICIES[name]
    apart = [
        generate(model, prompt, sampling=one, draft_length=0).tokens
        for prompt, one in zip(PROMPTS, settings, strict=True)
    ]
    assert len({len(tokens) for tokens in apart}) > 3
    outs = generate(model, PROMPTS, sampling=settings, batch=2, **options)
    assert [out.tokens for out in outs] == apart
    order = [6, 2, 4, 0, 5, 1, 3]
    mixed = generate(
        model,
        [PROMPTS[i] for i in order],
        sampling=[settings[i] for i in order],
        batch=3,
        **options,
    )
    assert [out.tokens for out in mixed] == [apart[i] for i in order]
    for one in outs:
        stats = one.stats
        assert stats.generated == len(one.tokens)
        assert stats.drafted + stats.rounds == stats.verified_rows
        assert stats.generated <= 1 + stats.verified_rows
        if name == "plain":
            assert stats.rounds == len(one.tokens) - 1


@pytest.mark.parametrize(
    "verification", ["exact", pytest.param("shared_noise", marks=SLOW)]
)
def test_draws_follow_the_seed_and_not_the_place(model, verification):
    warm = [SamplingParams(temperature=3.0, seed=90 + i) for i in range(len(PROMPTS))]
    lengths = (2, 17, 5, 9, 1, 12, 20)
    ends = [dataclasses.replace(one, stop_ids=tuple(range(65, 73))) for one in warm]
    options = dict(verification=verification, max_new_tokens=max(lengths))
    apart = [
        generate(model, prompt, sampling=one, **options).tokens
        for prompt, one in zip(PROMPTS, ends, strict=True)
    ]
    outs = generate(model, PROMPTS, sampling=ends, batch=2, **options)
    assert [out.tokens for out in outs] == apart
    # Control: these texts do depend on the seed.
    others = [dataclasses.replace(one, seed=one.seed + 50) for one in ends]
    outs = generate(model, PROMPTS, sampling=others, batch=2, **options)
    assert [out.tokens for out in outs] != apart


def test_logs_and_scores_are_the_requests_own(model, settings):
    options = dict(trace=True, logprobs=True)
    together = generate(model, PROMPTS, sampling=settings, batch=2, **options)
    for prompt, one, out in zip(PROMPTS, settings, together, strict=True):
        alone = generate(model, prompt, sampling=one, **options)
        assert out.rounds is not None and alone.rounds is not None
        assert [log.position for log in out.rounds] == [
            log.position for log in alone.rounds
        ]
        assert [log.accepted for log in out.rounds] == [
            log.accepted for log in alone.rounds
        ]
        np.testing.assert_allclose(out.logprobs, alone.logprobs, rtol=1e-4, atol=1e-4)


def test_a_place_is_given_away_while_rounds_are_in_flight(model, settings, monkeypatch):
    """Nothing else would show that the rounds' tokens are dropped."""
    seen, real = [], batch_module.Batch.join

    def join(self, places, *args):
        seen.append(len(self._flights))
        return real(self, places, *args)

    monkeypatch.setattr(batch_module.Batch, "join", join)
    generate(model, PROMPTS, sampling=settings, batch=2)
    assert 1 in seen


def test_joining_compiles_once(model, settings):
    options = dict(sampling=settings, batch=2)
    generate(model, PROMPTS, **options)
    before = model.programs.count
    generate(model, PROMPTS[::-1], **options)
    assert model.programs.count == before


def test_a_place_that_was_given_away_has_no_next_turn(model, settings):
    outs = generate(model, PROMPTS[:3], sampling=settings[:3], batch=2)
    for states in (outs[0].state, [out.state for out in outs]):
        with pytest.raises(ValueError, match="given to another request"):
            generate(model, ["x"] * 3 if isinstance(states, list) else "x",
                     state=states)  # fmt: skip
    with pytest.raises(ValueError, match="given to another request"):
        _ = outs[0].state.tokens
    kept = generate(model, PROMPTS[:2], batch=2)
    again = generate(model, ["x", "y"], state=[out.state for out in kept])
    assert all(len(out.tokens) == 20 for out in again)
    with pytest.raises(ValueError, match="`batch` is 1 and `state` has 2"):
        generate(model, ["x", "y"], state=[out.state for out in again], batch=1)


@pytest.mark.parametrize("batch", [0, 9, True, 2.0])
def test_places_are_checked(model, batch):
    with pytest.raises(ValueError, match=r"`batch` is .* 1\.\.8"):
        dspark.stream(model, "ab", batch=batch)


def test_equal_seeds_are_refused_however_far_apart(model):
    # Not only those that begin together.
    sampling = [SamplingParams(temperature=1.0, seed=i) for i in (1, 2, 3, 1)]
    with pytest.raises(ValueError, match="`seeds`"):
        dspark.stream(
            model, PROMPTS[:4], sampling=sampling, batch=2, policy=Threshold()
        )
