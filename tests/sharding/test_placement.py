"""`load(..., mesh=...)` and where weights end up."""

import jax
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.models.params import flatten
from dspark_jax.spec import param_shardings
from tests.sharding.conftest import AUTO, make_mesh, one_device

# Whole on every device by declaration: they mix all features, or are small.
WHOLE = {("fc", "weight"), ("markov", "w1", "weight")}


def share(spec, mesh):
    axes = [axis for entry in spec if entry for axis in np.atleast_1d(entry)]
    return int(np.prod([mesh.shape[axis] for axis in axes], initial=1))


def check_places(model, mesh, at_least):
    """Every weight has its declared share on each device; lists whole ones."""
    whole, split = [], 0
    places = {k: flatten(v) for k, v in param_shardings(model.spec).items()}
    for part, tree in model.params.items():
        for key, leaf in flatten(tree).items():
            if key in places[part]:
                place = places[part][key]
                assert leaf.sharding.is_equivalent_to(place, leaf.ndim), key
            parts = share(leaf.sharding.spec, mesh)
            assert len(leaf.addressable_shards) == mesh.size
            for shard in leaf.addressable_shards:
                assert shard.data.nbytes * parts == leaf.nbytes, key
            split += parts > 1
            if parts == 1 and leaf.nbytes > 2**15:
                whole.append((part, *key))
    assert split >= at_least
    return whole


@pytest.mark.parametrize("name", ["llama_rand", "qwen3_rand"])
def test_fr48_load_places_shards(data_dir, name):
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), axis_types=(AUTO, AUTO), devices=jax.devices()[:4]
    )
    draft = data_dir / name / "draft_vanilla"
    model = dspark.load(
        data_dir / name / "target", draft if draft.exists() else None, mesh=mesh
    )
    whole = check_places(model, mesh, at_least=8)
    assert {key[1:] for key in whole} <= WHOLE
    plain = dspark.load(data_dir / name / "target", draft=None).params["target"]
    for key in flatten(plain):
        if "layers" not in key:
            np.testing.assert_array_equal(
                flatten(model.params["target"])[key], flatten(plain)[key]
            )


def test_fr48_a_weight_that_stayed_whole_is_listed():
    # Control: the same check on weights that were never placed in shards.
    mesh = make_mesh(2, 4)
    model = one_device()
    everywhere = jax.device_put(model.params, jax.NamedSharding(mesh, jax.P()))
    spec = dspark.Spec(model.spec.target, model.spec.draft, mesh)
    with pytest.raises(AssertionError, match="embed|proj|lm_head|w2"):
        check_places(dspark.make_model(spec, everywhere), mesh, at_least=1)


@pytest.mark.parametrize("reduced, axis", [(40, "tensor"), (41, None)])
def test_fr48_shared_rows_of_the_head_are_split(reduced, axis):
    mesh = make_mesh(2, 4)
    model = one_device(8, reduced)
    spec = dspark.Spec(model.spec.target, model.spec.draft, mesh)
    places = param_shardings(spec)
    shared = places["draft"].pop("lm_head")["weight"]
    draft = {k: v for k, v in model.params["draft"].items() if k != "lm_head"}
    # `make_model` gathers the rows from the placed head.
    params = jax.device_put({"target": model.params["target"], "draft": draft}, places)
    rows = dspark.make_model(spec, params).params["draft"]["lm_head"]["weight"]
    assert rows.sharding.is_equivalent_to(shared, 2)
    assert (*rows.sharding.spec, None)[0] == axis
    np.testing.assert_array_equal(rows, model.params["draft"]["lm_head"]["weight"])


@pytest.mark.parametrize("shape", [(2, 4), (1, 8), (8, 1)])
def test_declared_places_of_every_architecture(shape):
    mesh = make_mesh(*shape)
    for architecture in ("llama", "qwen3", "gemma4"):
        target = dspark.testing.tiny_config(architecture, num_heads=8, num_kv_heads=8)
        draft = dspark.testing.tiny_draft_config(target)
        spec = dspark.Spec(target, draft, mesh)
        flat = flatten(param_shardings(spec))
        cut = {key for key, place in flat.items() if not place.is_fully_replicated}
        names = {key[-2] for key in cut if key[0] == "target"}
        if shape[1] == 1:
            assert not cut
            continue
        want = {"embed", "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        assert want <= names
        # Gemma4's full layers have one key/value head, which is never cut.
        kv = {key[2] for key in cut if key[-2] == "k_proj" and key[0] == "target"}
        if architecture == "gemma4":
            assert "full" not in kv
        else:
            assert kv == {"full"}
        # Cuts lie on the output of the first and the input of the second matrix.
        for key in cut:
            index = 2 if key[-2] in ("o_proj", "down_proj") else -2
            if key[-1] == "weight":
                place = (*flat[key].spec, None, None, None)
                axes = 3 if "layers" in key else 2
                assert place[:axes][index] == "tensor", key


def test_meshes_that_do_not_fit_are_refused(data_dir):
    path = data_dir / "llama_rand" / "target"
    explicit = jax.make_mesh(
        (2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    with pytest.raises(ValueError, match="axis types"):
        dspark.load(path, mesh=explicit)
    other = jax.make_mesh((8,), ("model",), axis_types=(AUTO,))
    with pytest.raises(ValueError, match="'data' and 'tensor'"):
        dspark.load(path, mesh=other)
    with pytest.raises(ValueError, match="need a mesh"):
        param_shardings(one_device().spec)
