"""What a measurement ran on: hardware, versions, memory bandwidth."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

PACKAGES = ("jax", "jaxlib", "flax")


def hardware() -> dict[str, Any]:
    """Device, its name and count, CPU cores, and how busy the machine is."""
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    facts: dict[str, Any] = {
        "platform": device.platform,
        "device": _cpu_name() if on_cpu else device.device_kind,
        "devices": jax.device_count(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
    }
    if hasattr(os, "getloadavg"):
        # Above the number of cores, other work shared the machine.
        facts["load_average"] = round(os.getloadavg()[0], 2)
    return facts


def versions() -> dict[str, str]:
    """Python and the libraries that matter for speed."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **found}


class ReadProbe:
    """Times a jitted reduction over an array, to see how fast memory is read.

    Attributes:
      nbytes: of the array.
      seconds: of a reading, one entry a run.
    """

    def __init__(self, megabytes: int = 256):
        """Allocates and compiles."""
        self._data = jnp.ones((16 * megabytes, 1 << 14), jnp.float32)
        self._reduce = jax.jit(lambda x: jnp.sum(x, axis=1))
        self.nbytes = self._data.nbytes
        self.seconds: list[float] = []
        self.run()
        self.seconds.clear()

    def run(self) -> None:
        """Reads the array once."""
        began = time.perf_counter()
        jax.block_until_ready(self._reduce(self._data))
        self.seconds.append(time.perf_counter() - began)

    @property
    def bandwidth(self) -> float:
        """Bytes a second, median over the runs."""
        return self.nbytes / statistics.median(self.seconds)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
