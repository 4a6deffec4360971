"""Whether a call fits into memory, before anything is allocated."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from dspark_jax.decoding.state import state_bytes
from dspark_jax.spec import Spec

GIB = 1024**3


def check_memory(
    spec: Spec, batch: int, capacity: int, draft_length: int, sampled: bool
) -> None:
    """Raises ValueError when caches and logits do not fit the device.

    Args:
      spec: the model; its weights are already placed.
      batch: requests of the batch bucket.
      capacity: cache positions a request.
      draft_length: drafts a round.
      sampled: whether laws are kept.
    """
    free = free_bytes()
    need = state_bytes(spec, batch, capacity, draft_length, sampled, prefill=256)
    devices = spec.mesh.size if spec.mesh is not None else 1
    total = sum(need.values()) // devices
    if free is None or total <= free:
        return
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in need.items())
    raise ValueError(
        f"{batch} requests of {capacity} positions need {total / GIB:.2f} GiB a device "
        f"({parts} GiB in all) but {free / GIB:.2f} GiB are free; ask for fewer "
        "prompts at once, a smaller `max_new_tokens` or `capacity`"
    )


def free_bytes() -> int | None:
    """Free memory of the first device; None where it cannot be told."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if device.platform != "cpu":
        return None
    return _free_host_bytes()


def _free_host_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None
