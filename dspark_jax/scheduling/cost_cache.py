"""Measured curves on disk, so that a server need not measure at every start."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dspark_jax
from dspark_jax.config import require
from dspark_jax.files import replace_text
from dspark_jax.scheduling.budget import Curve, curve

logger = logging.getLogger(__name__)

Plain = str | int | float | bool | None


@dataclass(frozen=True)
class CurveKey:
    """What a curve was measured on and for. Only an equal key may use it.

    Attributes:
      device_kind: as JAX names it.
      devices: how many of them.
      model: fields that tell the model's cost, such as sizes and dtypes, in the order
        of their names.
      sizes: compiled rows.
      jax: version.
      jaxlib: version.
      dspark_jax: version.
    """

    device_kind: str
    devices: int
    model: tuple[tuple[str, Plain], ...]
    sizes: tuple[int, ...]
    jax: str
    jaxlib: str
    dspark_jax: str


def curve_key(
    model: Mapping[str, Plain],
    sizes: Sequence[int],
    devices: Sequence[Any] | None = None,
) -> CurveKey:
    """The key of a model on this machine.

    A CPU has no kind but "cpu": where caches travel between machines, put what tells
    them apart into `model`.

    Args:
      model: fields that tell the model's cost: plain values by name.
      sizes: compiled rows, strictly increasing.
      devices: JAX devices that the model runs on, of one kind; None: all of JAX's.

    Raises:
      ValueError: a field that is no plain value, no device.
    """
    for name, value in model.items():
        ok = value is None or isinstance(value, str | int | float | bool)
        require(ok, f"model[{name!r}]", value, "str, int, float, bool or None")
    devices = jax.devices() if devices is None else devices
    require(len(devices) > 0, "devices", devices, "one or more")
    return CurveKey(
        device_kind=devices[0].device_kind,
        devices=len(devices),
        model=tuple(sorted(model.items())),
        sizes=tuple(int(size) for size in sizes),
        jax=jax.__version__,
        jaxlib=version("jaxlib"),
        dspark_jax=dspark_jax.__version__,
    )


@dataclass(frozen=True, eq=False)
class Measured:
    """What was measured under one key.

    Attributes:
      curve: verification, by rows.
      draft_ms: of one proposal, >= 0.
    """

    curve: Curve
    draft_ms: float

    def __post_init__(self) -> None:
        ok = isinstance(self.draft_ms, int | float) and np.isfinite(self.draft_ms)
        require(ok and self.draft_ms >= 0, "draft_ms", self.draft_ms, "finite, >= 0")


def save_costs(path: str | Path, key: CurveKey, measured: Measured) -> None:
    """Writes costs, whole or not at all; what `path` held is gone.

    Raises:
      ValueError: a curve of other sizes than the key's.
    """
    sizes = tuple(int(size) for size in measured.curve.sizes)
    require(sizes == key.sizes, "sizes", sizes, f"those of the key, {key.sizes}")
    # A float32 is a float64, and JSON keeps all of its digits.
    ms = [float(x) for x in np.asarray(measured.curve.ms)]
    values = {"key": _plain(key), "ms": ms, "draft_ms": measured.draft_ms}
    text = json.dumps(values, indent=2)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text + "\n")


def load_costs(path: str | Path, key: CurveKey) -> Measured | None:
    """What was measured under this key; None where there is none to be read."""
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        if stored["key"] != _plain(key):
            logger.info("%s was measured for something else", path)
            return None
        return Measured(curve(key.sizes, stored["ms"]), stored["draft_ms"])
    except FileNotFoundError:
        return None
    # Not a file, no JSON, no such fields, no times.
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s)", path, error)
        return None


def cached_costs(
    path: str | Path, key: CurveKey, measure: Callable[[], Measured]
) -> Measured:
    """The stored costs, else new ones, which are stored.

    Raises:
      ValueError: `measure` gave a curve of other sizes than the key's.
      OSError: the new ones cannot be written.
    """
    found = load_costs(path, key)
    if found is None:
        found = measure()
        save_costs(path, key, found)
    return found


def _plain(key: CurveKey) -> dict[str, object]:
    """As JSON gives it back."""
    fields = asdict(key)
    return fields | {"model": dict(key.model), "sizes": list(key.sizes)}
