"""Which round's confidences choose a total, and which divide it.

The reference counts decode steps of an engine; its step k is round k - 1 here:

    engine     prompt        step 1            step 2          step 3
    here       chunks        prefill, round 0  round 1         round 2
    verifies   -             placeholders      drafts of 1     drafts of 2
    total      -             zeros             ones            confidence of 1
    division   -             zeros             confidence of 1 confidence of 2

Rows of the engine's own, which have no counterpart here:

* step 1 verifies placeholders that the prompt step left, worth zeros. Here the prompt
  ends in round 0, which has no drafts to verify and makes the first real ones.
* `host_allocation_from` one step behind is provisional: the engine's host divides by
  what it has, and the device divides again. Here only the device divides.
"""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding import batch as batch_module
from dspark_jax.decoding import host_choice
from dspark_jax.decoding.schedule import Plan, with_memory
from dspark_jax.scheduling import decide
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel
from dspark_jax.scheduling.policy import Budget
from tests.decoding.serving import decode_round, no_words, prefill, requests_for
from tests.models.quick import quick_jit

N, STEPS = 2, 5
COSTS = CostModel(curve([2, 3], [10.0, 11.5]), draft_ms=1.0)


@pytest.fixture(scope="module")
def reference(data_dir):
    path = data_dir / "scheduling" / "confidence_rounds.json"
    return json.loads(path.read_text())


def wanted(rows, division):
    """(total from, division from) of rounds 1.. in the words of this module."""
    assert [row["step"] for row in rows] == [f"decode {k + 1}" for k in range(STEPS)]
    # The engine's own first step.
    assert rows[0]["total_from"] == rows[0]["host_allocation_from"] == "zeros"
    assert not rows[0]["has_draft"]

    def here(text):
        # Its step k is round k - 1.
        words = text.split("confidence of decode ")
        return text if len(words) == 1 else f"round {int(words[1]) - 1}"

    return [(here(row["total_from"]), here(row[division])) for row in rows[1:]]


def source(values, generation, made):
    """Which round made an offer; "ones" where it stands for none."""
    if np.all(np.asarray(values) == 1):
        return "ones"
    return f"round {made[int(np.asarray(generation)[0])]}"


@pytest.mark.parametrize(
    ("ahead", "rows", "division"),
    [
        pytest.param(
            1, "host_caught_up", "host_allocation_from", marks=pytest.mark.slow
        ),
        (2, "host_one_step_behind", "device_allocation_from"),
    ],
)
def test_the_host_loop(model, monkeypatch, reference, ahead, rows, division):
    monkeypatch.setattr(batch_module, "AHEAD", ahead)
    made, totals, divided = {}, [], []
    choose, launch = host_choice.choose_on_host, batch_module.Batch.launch
    add = host_choice.HostChoice.add

    def noted_total(offer, costs, rounds):
        totals.append(offer)
        return choose(offer, costs, rounds)

    def noted_launch(self):
        newest = self.state.memory.newest
        divided.append(tuple(np.asarray(x) for x in (newest.values, newest.generation)))
        launch(self)

    def noted_offer(self, number, offer):
        made.setdefault(int(np.asarray(offer.generation)[0]), number)
        add(self, number, offer)

    monkeypatch.setattr(host_choice, "choose_on_host", noted_total)
    monkeypatch.setattr(batch_module.Batch, "launch", noted_launch)
    monkeypatch.setattr(host_choice.HostChoice, "add", noted_offer)
    dspark.generate(
        model, "ab", max_new_tokens=24, chat=False, policy=Budget(), costs=COSTS
    )
    found = [
        (source(total.values, total.generation, made), source(*values, made))
        for total, values in zip(totals, divided, strict=True)
    ]
    assert found[: STEPS - 1] == wanted(reference[rows], division)
    # And so on, to the end.
    later = [(f"round {k - 2}", f"round {k - 1}") for k in range(2, len(found) + 1)]
    assert found[1:] == later and len(found) > STEPS


def test_rounds_that_choose_on_the_device(model, reference):
    tokens = jnp.asarray([[97, 98]], jnp.int32)
    budget, requests = (
        jnp.asarray([40], jnp.int32),
        requests_for(dspark.SamplingParams()),
    )
    words = no_words(1, N)
    plan = Plan(COSTS.table(1), None, Budget(), (2, 3))

    @functools.partial(quick_jit, static_argnames="first")
    def run(params, state, first):
        if first:
            lengths = jnp.asarray([2], jnp.int32)
            state, _ = prefill(
                model.spec, params, tokens, lengths, budget, requests, words, N,
                "greedy", 64,
            )  # fmt: skip
            return with_memory(model.spec, Budget(), state, requests)
        return decode_round(
            model.spec, params, state, requests, words, N, "greedy", plan=plan
        )[0]

    state = run(model.params, None, first=True)
    made, found = {}, []
    for at in range(STEPS - 1):
        newest, older = state.memory.newest, state.memory.older
        made[int(newest.generation[0])] = at
        # What `lengths` reads: `older` for the total, `newest` for the division.
        found.append(
            (
                source(older.values, older.generation, made),
                source(newest.values, newest.generation, made),
            )
        )
        total = int(decide.total_of(older, plan.costs))
        before = int(state.counters.verified_rows[0])
        state = run(model.params, state, first=False)
        assert int(state.counters.verified_rows[0]) - before == total
    rows = reference["host_one_step_behind"]
    assert found == wanted(rows, "device_allocation_from")
