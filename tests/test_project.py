"""The project's own promises: version, interpreter choice, session settings."""

import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PICK_PYTHON = ROOT / "scripts" / "pick_python.sh"


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_version_agrees_with_changelog():
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading is not None
    assert heading[1] == _project()["version"]


def test_version_agrees_with_the_installed_one():
    try:
        installed = importlib.metadata.version("dspark-jax")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("dspark-jax is not installed; running from the source tree")
    assert installed == _project()["version"]


def _pick(*args: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(PICK_PYTHON), *args],
        env=os.environ | env,
        capture_output=True,
        text=True,
    )


def test_pick_python_prints_a_runnable_interpreter():
    path = _pick().stdout.strip()
    code = "import sys, venv, ensurepip; print(sys.version_info >= (3, 11))"
    out = subprocess.run([path, "-c", code], capture_output=True, text=True)
    assert out.stdout == "True\n"


def test_pick_python_takes_the_newest_and_skips_what_does_not_run(tmp_path):
    def fake(name: str, line: str) -> None:
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{line}\n")
        file.chmod(0o755)

    # Both print what the probe would: version, its three numbers, path.
    fake("python3", "echo 3.98 3 98 1 /some where/python3")
    fake("python3.11", "echo 3.11 3 11 9 /python3.11")
    fake("python3.99", "echo 3.99 3 99 0 /shim; exit 127")
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYENV_ROOT": str(tmp_path / "none"),
    }
    assert _pick(**env).stdout == "/some where/python3\n"
    assert _pick("3.98", **env).stdout == "/some where/python3\n"
    refused = _pick("3.99", **env)
    assert refused.returncode == 1
    assert "3.99" in refused.stderr


def test_pick_python_looks_under_pyenv(tmp_path):
    folder = tmp_path / "versions" / "3.97.1" / "bin"
    folder.mkdir(parents=True)
    file = folder / "python3"
    file.write_text("#!/bin/sh\necho 3.97 3 97 1 $0\n")
    file.chmod(0o755)
    assert _pick("3.97", PYENV_ROOT=str(tmp_path)).stdout == f"{file}\n"


def test_session_is_strict():
    assert jax.device_count() == 8 or jax.default_backend() != "cpu"
    with pytest.raises(Exception, match="promotion"):
        jnp.ones(2, jnp.bfloat16) + jnp.ones(2, jnp.float32)
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 2)) + jnp.ones(2)


def test_compile_counter_names_programs_and_restarts(compile_counter):
    @jax.jit
    def probe_program(x):
        return x * 2

    x = np.ones(3, np.float32)
    probe_program(x)
    probe_program(x)
    assert compile_counter.count("probe_program") == 1
    probe_program(np.ones(4, np.float32))
    assert compile_counter.count("probe_program") == 2
    compile_counter.restart()
    probe_program(x)
    assert compile_counter.programs == []
