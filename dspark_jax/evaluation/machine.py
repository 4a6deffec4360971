"""What a measurement ran on: hardware, versions, memory bandwidth."""

from __future__ import annotations

import importlib.metadata
import os
import platform
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


def read_bandwidth(megabytes: int = 256, repeats: int = 7) -> float:
    """Bytes a second that a jitted reduction reads; the best of `repeats`."""
    rows = 16 * megabytes
    data = jnp.ones((rows, 1 << 14), jnp.float32)
    reduce = jax.jit(lambda x: jnp.sum(x, axis=1))
    jax.block_until_ready(reduce(data))
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(reduce(data))
        best = min(best, time.perf_counter() - began)
    return data.nbytes / best


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
