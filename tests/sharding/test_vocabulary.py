"""A round on a mesh gathers no row over the vocabulary."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding import laws
from dspark_jax.decoding.drafting import draft_next
from dspark_jax.decoding.masks import masked, packed
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


def compiled(model, variant, masks=None):
    spec = model.spec
    sampling = dspark.SamplingParams(temperature=1.0, top_k=5)
    asked = dspark.pack_requests(
        [sampling] * BATCH, np.zeros((BATCH, 2), np.uint32), ()
    )

    def run(params, state):
        words = round_words(asked.seeds, state.length + 1, N)
        return decode_round(spec, params, state, asked, words, N, variant, masks=masks)

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
    masks = np.full((BATCH, N + 1, 9), 5, np.uint32)
    for variant, given in [("filtered", None), ("greedy", None), ("sampled", masks)]:
        assert gathered_rows(compiled(model, variant, given), {264, 66}) == set()


@pytest.mark.parametrize("shape", [(2, 4), (1, 8), (1, 5)])
def test_every_share_of_the_vocabulary_has_its_bits(shape):
    spec = dataclasses.replace(one_device().spec, mesh=make_mesh(*shape))
    rng = np.random.default_rng(0)
    allowed, logits = rng.random((BATCH, 264)) < 0.5, rng.random((BATCH, 264))
    out = jax.jit(functools.partial(masked, spec))(
        logits.astype(np.float32), packed(allowed)
    )
    wanted = np.where(allowed, logits.astype(np.float32), -np.inf)
    np.testing.assert_array_equal(out, wanted)
