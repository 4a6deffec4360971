"""A round of DeepSeek-V4 at its real dimensions, for GPUs that are not there.

Nothing is allocated: parameters and state are shapes with a place on a mesh. Lowering
for CUDA needs no GPU software; `--compile` also runs XLA's compiler for eight H200 and
reports what each of them would hold (needs what `make gpu-lowering` installs).

    python scripts/lower_v4.py CONFIG_JSON --devices 8 --requests 4
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.extras import NOTHING
from dspark_jax.decoding.requests import pack_requests
from dspark_jax.decoding.round import decode_round
from dspark_jax.decoding.state import DecodeState, new_state
from dspark_jax.decoding.words import RoundWords
from dspark_jax.models import family
from dspark_jax.models.draft.proposal import Proposal
from dspark_jax.models.params import flatten, unflatten
from dspark_jax.planning import read_settings
from dspark_jax.settings import SamplingParams
from dspark_jax.spec import Spec, param_shardings

REDUCE = '"stablehlo.all_reduce"'


def abstract_round(spec: Spec, batch: int, capacity: int) -> tuple[Any, tuple]:
    """A greedy round with all drafts, and its arguments as shapes on the mesh."""
    n = spec.gamma
    places = param_shardings(spec)
    assert spec.draft is not None
    shapes = {
        "target": family.target_of(spec.target).abstract_params(spec.target),
        "draft": family.draft_of(spec.draft).abstract_draft_params(spec.draft),
    }
    params = unflatten(
        {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
            for (path, leaf), place in zip(
                flatten(shapes).items(), flatten(places).values(), strict=True
            )
        }
    )

    assert spec.mesh is not None
    whole = jax.NamedSharding(spec.mesh, jax.P())

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree
        )

    # Shapes do not depend on the mesh.
    bare = dataclasses.replace(spec, mesh=None)
    state = placed(jax.eval_shape(lambda: start_of(bare, batch, capacity, n)))
    seeds = np.zeros((batch, 2), np.uint32)
    requests = placed(pack_requests([SamplingParams()] * batch, seeds, ()))
    fresh, drafted = np.zeros((batch, n + 1)), np.zeros((batch, n + 2, n))
    words = placed(RoundWords(*(jnp.asarray(x, jnp.uint32) for x in (fresh, drafted))))

    def run(params, state, requests, words):
        return decode_round(spec, params, state, requests, words, n, "greedy", NOTHING)

    return run, (params, state, requests, words)


def start_of(spec: Spec, batch: int, capacity: int, n: int) -> DecodeState:
    """A state with a greedy proposal."""
    state = new_state(spec, batch, capacity, n, stacked=False)
    zeros = jnp.zeros((batch, n), jnp.int32)
    confidence = jnp.zeros((batch, n), jnp.float32)
    proposal = Proposal(zeros, None, None, confidence, jnp.zeros((batch,), jnp.int32))
    return dataclasses.replace(state, proposal=proposal)


def main() -> None:
    """Prints how long each stage takes, and sizes."""
    parser = argparse.ArgumentParser(description="lower a round of DeepSeek-V4")
    parser.add_argument("config")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--layers", type=int, help="only so many of them")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    target, draft = read_settings(options.config)
    if options.layers:
        target, draft = shallow(target, draft, options.layers)
    mesh = mesh_of(options.devices, options.compile)
    spec = Spec(target, draft, mesh=mesh, cache_dtype="bfloat16")
    run, args = abstract_round(spec, options.requests, options.context)
    began = time.perf_counter()
    traced = jax.jit(run, donate_argnums=1).trace(*args)
    print(f"traced in {time.perf_counter() - began:.1f} s")
    began = time.perf_counter()
    lowered = traced.lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    took = time.perf_counter() - began
    print(f"lowered for CUDA in {took:.1f} s, {len(text) / 1e6:.1f} MB of text")
    print(f"all-reduces written by hand: {text.count('stablehlo.all_reduce')}")
    if options.compile:
        began = time.perf_counter()
        compiled = lowered.compile()
        print(f"compiled in {time.perf_counter() - began:.1f} s")
        print(compiled.memory_analysis())


def shallow(target: Any, draft: Any, layers: int) -> tuple[Any, Any]:
    """The first layers of a target, and a draft that taps the last three of them."""
    ratios = target.compress_ratios[:layers]
    hashed = min(target.num_hash_layers, layers)
    taps = tuple(range(max(0, layers - 3), layers))
    return (
        dataclasses.replace(target, compress_ratios=ratios, num_hash_layers=hashed),
        dataclasses.replace(draft, target_layer_ids=taps, num_target_layers=layers),
    )


def mesh_of(devices: int, real: bool) -> Any:
    """A mesh of devices that do not exist: by number, or as a GPU topology."""
    axis = (jax.sharding.AxisType.Auto,)
    if not real:
        return jax.sharding.AbstractMesh((devices,), ("tensor",), axis_types=axis)
    from jax.experimental import topologies

    from scripts.check_gpu_lowering import DEVICES, target_config

    found = topologies.get_topology_desc(
        topology_name="",
        platform="cuda",
        topology=f"1x1x{devices}",
        target_config=target_config(DEVICES["sm_90"]),
    ).devices
    return jax.make_mesh((devices,), ("tensor",), axis_types=axis, devices=found)


if __name__ == "__main__":
    main()
