"""The published settings: their bytes, their layers, and a round lowered for GPUs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.checkpoint.v4_config import v4_config, v4_draft_config
from dspark_jax.errors import CheckpointError
from dspark_jax.models import deepseek_v4
from dspark_jax.models.deepseek_v4.state import empty_state, state_bytes
from dspark_jax.models.params import flatten
from dspark_jax.planning import make_plan, read_settings
from dspark_jax.spec import Spec
from scripts import lower_v4
from tests.deepseek_v4.goldens import DATA

PUBLISHED = DATA / "flash_0731.json"
# Data bytes of the 48 files; their table of expert ids has eight bytes a number.
FILES = 166_878_536_440
IDS = 3 * 129_280 * 6
STAGES = 10_862_838_300


def settings(**changes):
    return {**json.loads(PUBLISHED.read_text()), **changes}


def test_layers():
    config = v4_config(settings())
    ratios = config.compress_ratios
    assert len(ratios) == 43 and ratios.count(0) == 2
    assert ratios.count(4) == 21 and ratios.count(128) == 20
    draft = v4_draft_config(settings(), config)
    # `num_nextn_predict_layers` says one.
    assert draft.backbone.num_layers == 3 and draft.gamma == 5
    assert draft.target_layer_ids == (40, 41, 42)


def test_bytes_on_one_device_are_those_of_the_files():
    plan = make_plan(*read_settings(PUBLISHED), devices=1, memory=10**12)
    assert sum(plan.parameters.values()) == FILES - 4 * IDS
    assert plan.parameters["draft"] == STAGES
    assert plan.fits and not dataclasses.replace(plan, memory=10**11).fits


def test_eight_devices_hold_an_eighth_of_what_is_split():
    target, draft = read_settings(PUBLISHED)
    one, eight = (
        make_plan(target, draft, devices=n, memory=10**12).parameters["target"]
        for n in (1, 8)
    )
    shapes = flatten(deepseek_v4.abstract_params(target))
    experts = sum(x.size for path, x in shapes.items() if "experts" in path)
    # Experts are 94 % of all bytes; what is whole everywhere is little.
    assert experts / 8 < eight < 0.14 * one


def test_state_bytes():
    """At the published sizes as counted in the design, and as arrays have them."""
    target, _ = read_settings(PUBLISHED)
    found = {
        context: state_bytes(target, 1, context, jnp.dtype("bfloat16"))
        for context in (0, 65536)
    }
    # Accumulated rows in float32, windows of 128 in two bytes.
    rows, windows = 12_206_080, 43 * 128 * 512 * 2
    assert found[0] == rows + windows
    entries = 21 * 16384 * (512 + 128) * 2 + 20 * 512 * 512 * 2
    assert found[65536] - found[0] == entries
    small = dataclasses.replace(
        target, compress_ratios=(0, 4, 128), num_hash_layers=0, head_dim=128
    )
    state = empty_state(small, 2, 512, jnp.dtype("bfloat16"))
    arrays = sum(x.nbytes for x in flatten(_plain(state)).values())
    assert arrays == state_bytes(small, 2, 512, jnp.dtype("bfloat16"))


def _plain(state):
    return {
        f"{layer}.{name}": part
        for layer, own in state.items()
        for name, part in own.items()
        if not isinstance(part, dict)
    } | {
        f"{layer}.{name}.{leaf}": x
        for layer, own in state.items()
        for name, part in own.items()
        if isinstance(part, dict)
        for leaf, x in part.items()
    }


def lowered(layers):
    """A round of the first layers and three stages on eight devices, as text."""
    target, draft = lower_v4.shallow(*read_settings(PUBLISHED), layers)
    mesh = lower_v4.mesh_of(8, False)
    spec = Spec(target, draft, mesh=mesh, cache_dtype="bfloat16")
    run, args = lower_v4.abstract_round(spec, 4, 65536)
    return jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_a_round_on_eight_devices_lowers_for_cuda():
    """Nothing is allocated, and sums over devices are where they are written."""
    two, four = lowered(2), lowered(4)
    assert "tensor" in four and "num_partitions = 8" in four
    # Layers 2 and 3: two each, and one for the scores of the layer that selects.
    more = four.count(lower_v4.REDUCE) - two.count(lower_v4.REDUCE)
    assert more == 2 + 2 + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": None}, "neither `compress_ratios` nor `layer_types`"),
        ({"compress_ratios": [0, 4]}, "2 entries for 43 layers"),
        ({"scoring_func": "sigmoid"}, "`scoring_func` is 'sigmoid'"),
        ({"hidden_size": None}, "no `hidden_size`"),
        ({"tie_word_embeddings": True}, "`tie_word_embeddings` is True"),
        ({"o_groups": 7}, "`o_groups` is 7"),
    ],
)
def test_settings_that_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        v4_config(settings(**changes))
