"""A request that takes a place brings all of its own and touches no neighbour."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.joining import insert
from dspark_jax.decoding.state import new_state
from dspark_jax.models.draft.proposal import Proposal
from dspark_jax.scheduling.decide import first_memory
from dspark_jax.scheduling.memory import Offer
from dspark_jax.scheduling.policy import Budget, Gate

N = 2


def filled(spec, batch, policy, stacked, first):
    """A state whose every leaf counts up from `first`, no two numbers alike."""
    values = jnp.ones((batch, N), jnp.float32)
    marks = jnp.zeros((batch,), jnp.int32)
    offer = Offer(values, values, marks > 0, marks)
    state = dataclasses.replace(
        new_state(spec, batch, 64, N, stacked),
        proposal=Proposal(
            jnp.zeros((batch, N), jnp.int32),
            jnp.zeros((batch, N, 7), jnp.int32),
            jnp.zeros((batch, N), jnp.int32),
            values,
            marks,
        ),
        memory=first_memory(policy, offer),
    )

    def count(x):
        numbers = first + np.arange(x.size).reshape(x.shape)
        # Of a flag only the place in the count is left.
        return jnp.asarray(numbers % 2 == first % 2 if x.dtype == bool else numbers)

    return jax.tree.map(lambda x: count(x).astype(x.dtype), state)


@pytest.mark.parametrize("policy", [Budget(), Gate()])
@pytest.mark.parametrize("stacked", [False, True])
def test_every_number_of_a_place_is_replaced(policy, stacked):
    target = dspark.testing.tiny_config(layers=2, hidden_size=16, num_heads=2)
    spec = dspark.Spec(target, dspark.testing.tiny_draft_config(target, gamma=N))
    whole = filled(spec, 3, policy, stacked, 0)
    part = filled(spec, 2, policy, stacked, 1001)
    row, place = jnp.int32(1), jnp.int32(2)
    after = jax.jit(insert, static_argnums=0)(spec, whole, part, row, place)
    old, new, got = (
        jax.tree_util.tree_leaves_with_path(one) for one in (whole, part, after)
    )
    seen = 0
    for (path, before), (_, brought), (_, found) in zip(old, new, got, strict=True):
        name = jax.tree_util.keystr(path)
        if before.ndim == 0:
            assert name.endswith(".rounds") and found == before
            continue
        axis = before.ndim - 4 if "target" in name or ".draft[" in name else 0
        want = np.moveaxis(np.array(before), axis, 0)
        want[2] = np.moveaxis(np.asarray(brought), axis, 0)[1]
        np.testing.assert_array_equal(np.moveaxis(np.array(found), axis, 0), want, name)
        seen += 1
    assert seen > 25
