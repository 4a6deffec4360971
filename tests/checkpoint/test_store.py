"""The Orbax directory: formats, shapes and dtypes are checked before loading."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.serialization import tensorstore_utils

from dspark_jax.checkpoint import store
from dspark_jax.checkpoint.convert import convert
from dspark_jax.checkpoint.load import read_params
from dspark_jax.errors import CheckpointError
from dspark_jax.models.params import flatten

Q_PROJ = ("layers", "full", "q_proj", "weight")


@pytest.fixture
def stored(data_dir, tmp_path):
    convert(data_dir / "llama_rand/target", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def single():
    return jax.sharding.SingleDeviceSharding(jax.devices()[1])


def abstract(shape, dtype, sharding):
    leaf = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return {"layers": {"full": {"q_proj": {"weight": leaf}}}}


def test_part_of_a_checkpoint(stored, single):
    tree = store.load(stored, abstract((4, 64, 64), jnp.float32, single))
    leaf = flatten(tree)[Q_PROJ]
    assert list(flatten(tree)) == [Q_PROJ]
    assert leaf.devices() == {jax.devices()[1]}
    np.testing.assert_array_equal(leaf, flatten(read_params(stored)[2])[Q_PROJ])


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 64, 64), jnp.bfloat16), ((4, 64, 32), jnp.float32)]
)
def test_no_silent_cast(stored, single, shape, dtype):
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is float32"):
        store.load(stored, abstract(shape, dtype, single))


def test_unknown_leaf_and_missing_sharding(stored, single):
    leaf = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=single)
    with pytest.raises(CheckpointError, match="extra is missing"):
        store.load(stored, {"extra": leaf})
    with pytest.raises(ValueError, match="no sharding"):
        store.load(stored, abstract((4, 64, 64), jnp.float32, None))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "format None"),
        ({"format": 2}, "format 2"),
        ({"format": 1}, "damaged"),
        ({"format": 1, "kind": "tree", "config": {}}, "damaged"),
    ],
)
def test_foreign_directories(tmp_path, metadata, message):
    path = tmp_path / "foreign"
    ocp.save(path, {"a": np.ones(3, np.float32)}, custom_metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        read_params(path)


def test_parameters_that_do_not_match_the_config(stored, tmp_path):
    header = ocp.metadata(stored).custom_metadata
    other = tmp_path / "other"
    ocp.save(other, {"a": np.ones(3, np.float32)}, custom_metadata=header)
    with pytest.raises(CheckpointError, match=r"12 leaves do not match"):
        read_params(other)


def test_unfinished_directory(stored, tmp_path):
    unfinished = tmp_path / "x.partial-17"
    unfinished.mkdir()
    stored.rename(unfinished / "checkpoint")
    with pytest.raises(CheckpointError, match="did not finish"):
        read_params(unfinished / "checkpoint")


def test_leaves_may_be_missing_from_no_save(data_dir, tmp_path):
    _, config, params = read_params(data_dir / "llama_rand/target")
    leaves = list(flatten(params).items())[1:]
    values = ((path, np.asarray(leaf)) for path, leaf in leaves)
    with pytest.raises(ValueError, match="no value for embed"):
        store.save_streaming(tmp_path / "out", "target", config, {}, values)
    assert not list(tmp_path.iterdir())


def chunks_of(path, name):
    """Shapes of a stored leaf and of its chunks."""
    base = (path / "state").as_uri() + "/"
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec = {"driver": "zarr3", "kvstore": kvstore}
    array = ts.open(spec, open=True, read=True).result()
    return array.shape, array.chunk_layout.write_chunk.shape


def test_leaves_beyond_2_gib_stay_whole(data_dir, tmp_path, monkeypatch):
    """Orbax cuts leaves beyond a limit, and then holds a second copy of them.

    The limit is made small here, in place of the leaf being made large.
    """
    limit = "_DEFAULT_OCDBT_TARGET_DATA_FILE_SIZE"
    monkeypatch.setattr(tensorstore_utils, limit, 4096)
    convert(data_dir / "llama_rand/target", tmp_path / "out")
    shape, chunk = chunks_of(tmp_path / "out", "layers.full.q_proj.weight")
    assert shape == chunk == (4, 64, 64)
    # Control: as Orbax would have it.
    tree = {"leaf": np.zeros(shape, np.float32)}
    ocp.save(str(tmp_path / "plain"), tree)
    shape, chunk = chunks_of(tmp_path / "plain", "leaf")
    assert shape == (4, 64, 64) and chunk != shape
