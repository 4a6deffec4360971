"""Meshes of simulated devices, and models placed on them."""

import dataclasses
import functools

import jax

import dspark_jax as dspark
from dspark_jax.spec import param_shardings
from dspark_jax.testing import tiny_config, tiny_draft_config, tiny_model

AUTO = jax.sharding.AxisType.Auto


def make_mesh(data: int, tensor: int) -> jax.sharding.Mesh:
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(AUTO, AUTO))


def on_mesh(model: dspark.Model, mesh: jax.sharding.Mesh) -> dspark.Model:
    """The same model with every weight where its declaration puts it."""
    spec = dataclasses.replace(model.spec, mesh=mesh)
    params = jax.device_put(model.params, param_shardings(spec))
    return dspark.make_model(spec, params, model.tokenizer)


@functools.cache
def one_device(kv_heads: int = 8, reduced: int | None = None) -> dspark.Model:
    config = tiny_config(
        layers=1, hidden_size=64, num_heads=8, num_kv_heads=kv_heads, vocab_size=264
    )
    # Only ASCII is ever generated: one token is one character.
    config = dataclasses.replace(config, valid_vocab=128)
    draft = tiny_draft_config(config, gamma=2, draft_vocab_size=reduced)
    # Small weights make laws flat, so that about half of the drafts stand.
    return tiny_model(target=config, draft=draft, stacked=True, scale=0.5)
