"""Which implementation of an op runs: the reference, or a GPU kernel.

Both give the same bits, so that the choice is one of speed alone.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

Implementation = Literal["reference", "pallas"]
KERNELS_NEED_JAX = (0, 11, 2)


def require_implementation(name: str | None) -> None:
    """ValueError unless `name` is None or an implementation that can run here."""
    if name is not None and name not in get_args(Implementation):
        raise ValueError(
            f"`implementation` is {name!r}; allowed: None, 'reference', 'pallas'"
        )
    if name == "pallas" and (reason := why_no_kernels()):
        raise ValueError(f"implementation='pallas' cannot run here: {reason}")


def why_no_kernels() -> str | None:
    """What keeps the GPU kernels from running on the default device; None if nothing.

    Decided by the device that programs are compiled for, which need not be present.
    """
    version = importlib.metadata.version("jax")
    if _numbers(version) < KERNELS_NEED_JAX:
        needed = ".".join(map(str, KERNELS_NEED_JAX))
        return f"the kernels need jax >= {needed} and this is {version}"
    device = jax.config.jax_default_device
    if device is None:
        platform = jax.default_backend()
    else:
        platform = device if isinstance(device, str) else device.platform
    if platform not in ("gpu", "cuda"):
        return f"the default device is a {platform}, the kernels are for NVIDIA GPUs"
    return None


def implementation_here(
    name: Implementation | None, split: bool = False
) -> Implementation:
    """What None stands for.

    Args:
      name: an implementation or None.
      split: whether rows are split over a mesh axis.
    """
    if name is None:
        return "reference" if split or why_no_kernels() else "pallas"
    return name


def run(
    implementation: Implementation | None,
    reference: Callable[..., Any],
    kernel: Callable[..., Any],
    *args: Any,
    axis_name: str | None = None,
) -> Any:
    """Calls one of two functions of the same arrays.

    Args:
      implementation: None takes the kernel where it can run. A name is taken at its
        word.
      reference: takes `axis_name`, too.
      kernel: of whole rows.
      args: arrays.
      axis_name: mesh axis over which rows are split, or None.

    Raises:
      ValueError: an implementation that cannot run here, or kernels for split rows.
    """
    require_implementation(implementation)
    split = axis_name is not None
    if implementation == "pallas" and split:
        raise ValueError(
            "the kernels hold whole rows and these are split over the mesh axis "
            f"{axis_name!r}; use implementation='reference' or None"
        )
    if implementation == "pallas":
        return kernel(*args)
    if implementation_here(implementation, split) == "reference":
        return reference(*args, axis_name=axis_name)
    # A machine with a GPU may compile for its CPU as well.
    return jax.lax.platform_dependent(
        *args,
        cuda=kernel,
        default=lambda *a: reference(*a, axis_name=None),
    )


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.12.0.dev3" is (0, 12, 0)."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
