"""A round on a mesh gathers no row over the vocabulary."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding import laws
from dspark_jax.decoding.drafting import draft_next
from dspark_jax.decoding.round import decode_round
from dspark_jax.decoding.state import new_state
from dspark_jax.decoding.words import round_words
from tests.sharding.conftest import make_mesh, on_mesh, one_device

BATCH, N = 8, 2


def collectives(text):
    """(operation, shape) of everything that travels between devices."""
    operations = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= (.*?) ({operations})(?:-start)?\(", text)
    return {
        (name, tuple(int(d) for d in dims.split(",") if d))
        for types, name in found
        for dims in re.findall(r"\w+\[([\d,]*)\]", types)
    }


def gathered_rows(text, widths):
    """Collectives with rows, or shares of rows, over the vocabulary."""
    return {(name, shape) for name, shape in collectives(text) if set(shape) & widths}


def compiled(model, variant):
    spec = model.spec
    sampling = dspark.SamplingParams(temperature=1.0, top_k=5)
    asked = dspark.pack_requests(
        [sampling] * BATCH, np.zeros((BATCH, 2), np.uint32), ()
    )

    def run(params, state):
        words = round_words(asked.seeds, state.length + 1, N)
        return decode_round(spec, params, state, asked, words, N, variant)

    def first(params):
        state = new_state(spec, BATCH, 32, N, stacked=True)
        words = jnp.zeros((BATCH, N), jnp.uint32)
        return dataclasses.replace(
            state,
            proposal=draft_next(spec, params, state, asked, words, N, variant),
        )

    state = jax.eval_shape(first, model.params)
    return jax.jit(run).lower(model.params, state).compile().as_text() or ""


@pytest.mark.parametrize("reduced", [None, pytest.param(40, marks=pytest.mark.slow)])
def test_fr08_no_row_is_gathered(reduced, monkeypatch):
    model = on_mesh(one_device(8, reduced), make_mesh(2, 4))
    # 264 columns are four shares of 66, and 40 are four of 10.
    widths = {264, 66} | ({reduced, reduced // 4} if reduced else set())
    assert gathered_rows(compiled(model, "sampled"), widths) == set()
    if reduced:
        return

    # Control: ops on whole rows gather them, and the check sees it.
    def whole(spec, op, split, arrays, split_out):
        split = [jax.lax.with_sharding_constraint(x, everywhere(spec)) for x in split]
        return op(*split, *arrays, axis_name=None)

    def everywhere(spec):
        return jax.NamedSharding(spec.mesh, jax.P())

    monkeypatch.setattr(laws, "over_vocabulary", whole)
    assert gathered_rows(compiled(model, "sampled"), widths)


@pytest.mark.slow
def test_fr08_no_row_is_gathered_by_filters_and_greedy_rounds():
    model = on_mesh(one_device(), make_mesh(2, 4))
    for variant in ("filtered", "greedy"):
        assert gathered_rows(compiled(model, variant), {264, 66}) == set()
