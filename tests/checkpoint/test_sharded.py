"""Parameters land in their shards, also on another set of devices."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.checkpoint.convert import convert
from dspark_jax.checkpoint.load import read_params
from dspark_jax.models import dense
from dspark_jax.models.draft import backbone
from dspark_jax.models.params import flatten, shardings

AUTO = jax.sharding.AxisType.Auto


def placement(config, mesh):
    """The declared sharding of each parameter."""
    draft = hasattr(config, "backbone")
    shapes, axes = (backbone if draft else dense).declaration(config)
    counts = dense.unit_counts(config.backbone if draft else config)
    return flatten(shardings(shapes, axes, mesh, counts)).__getitem__


@pytest.mark.parametrize("converted", [True, False])
@pytest.mark.parametrize("name", ["qwen3_rand/target", "qwen3_rand/draft_vanilla"])
def test_fr48_shards_are_fractions(data_dir, tmp_path, converted, name):
    path = data_dir / name
    if converted:
        convert(path, tmp_path / "out")
        path = tmp_path / "out"
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (AUTO, AUTO), devices=devices)
    _, config, plain = read_params(path)
    place = placement(config, mesh)
    _, _, params = read_params(path, sharding_for=place)
    replicated, split = [], 0
    for key, leaf in flatten(params).items():
        assert leaf.sharding.is_equivalent_to(place(key), leaf.ndim), key
        assert len(leaf.addressable_shards) == 4
        parts = [2 if axis == "tensor" else 1 for axis in place(key).spec]
        share = leaf.addressable_shards[0].data.nbytes * int(np.prod(parts))
        assert share == leaf.nbytes, key
        split += max(parts) == 2
        if max(parts) == 1 and leaf.nbytes > 2**15:
            replicated.append(key)
    # `fc` mixes features of all heads and is declared whole, as is Markov's `w1`.
    assert set(replicated) <= {("fc", "weight"), ("markov", "w1", "weight")}
    assert split >= 7
    for key, leaf in flatten(plain).items():
        np.testing.assert_array_equal(leaf, flatten(params)[key])


LOAD = """
import json, sys
import jax, numpy as np
from dspark_jax.checkpoint.load import read_params
from dspark_jax.models.params import flatten
from tests.checkpoint.test_sharded import AUTO

count = int(sys.argv[2])
assert jax.device_count() == count
mesh = jax.make_mesh((count,), ("tensor",), axis_types=(AUTO,))

def place(key):
    spec = jax.P(None, "tensor") if key[-2] == "q_proj" else jax.P()
    return jax.NamedSharding(mesh, spec)

_, _, params = read_params(sys.argv[1], sharding_for=place)
for key, leaf in flatten(params).items():
    assert leaf.sharding.is_equivalent_to(place(key), leaf.ndim), key
    assert len(leaf.sharding.device_set) == count
np.savez(sys.argv[3], **{".".join(k): v for k, v in flatten(params).items()})
"""


@pytest.mark.slow
def test_fr46_saved_on_eight_devices_loads_on_fewer(data_dir, tmp_path):
    from dspark_jax.checkpoint import store

    source = data_dir / "qwen3_rand/target"
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AUTO, AUTO))

    def two_by_four(key):
        spec = jax.P(None, "data", "tensor") if key[-2].endswith("_proj") else jax.P()
        return jax.NamedSharding(mesh, spec)

    kind, config, params = read_params(source, sharding_for=two_by_four)
    leaves = flatten(params)
    q_proj = leaves[("layers", "full", "q_proj", "weight")]
    assert q_proj.addressable_shards[0].data.nbytes * 8 == q_proj.nbytes
    store.save_streaming(tmp_path / "out", kind, config, {}, leaves.items())
    for count in (1, 2):
        result = tmp_path / f"{count}.npz"
        subprocess.run(
            [sys.executable, "-W", "error", "-c", LOAD, tmp_path / "out", str(count)]
            + [result],
            cwd=Path(__file__).parents[2],
            env={
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
                "PATH": "",
            },
            check=True,
        )
        with np.load(result) as loaded:
            assert set(loaded) == {".".join(key) for key in leaves}
            for key, leaf in leaves.items():
                np.testing.assert_array_equal(loaded[".".join(key)], leaf)
