"""An editable DeepSeek-V4 checkpoint, and comparing parameters."""

import json

import numpy as np

from dspark_jax.checkpoint.safetensors_source import SafetensorsFolder, write_tensors
from dspark_jax.checkpoint.tensors import read
from dspark_jax.models.params import flatten


class Folder:
    """A checkpoint's settings and tensors, to change and write anywhere."""

    def __init__(self, path):
        files = SafetensorsFolder(path)
        self.config = json.loads((path / "config.json").read_text())
        self.tensors = {name: read(files, name) for name in files.info}

    def write(self, path, **tensors):
        """`tensors` replace others."""
        path.mkdir()
        (path / "config.json").write_text(json.dumps(self.config))
        write_tensors(path / "model.safetensors", self.tensors | tensors)
        return path


def assert_same(params, want):
    got, want = flatten(params), flatten(want)
    assert set(got) == set(want)
    for key, value in want.items():
        assert got[key].dtype == value.dtype, key
        np.testing.assert_array_equal(got[key], value, err_msg=str(key))
