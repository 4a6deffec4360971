"""Reading single fields of a `config.json` with errors that name them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dspark_jax.errors import CheckpointError

Json = Mapping[str, Any]


def required(data: Json, field: str) -> Any:
    """`data[field]`; CheckpointError when it is absent or null."""
    value = data.get(field)
    if value is None:
        raise CheckpointError(f"config.json has no `{field}`")
    return value


def required_int(data: Json, field: str) -> int:
    """`data[field]` as an int > 0."""
    value = required(data, field)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(
            f"config.json: `{field}` is {value!r}; allowed: an integer > 0"
        )
    return value


def value_or(data: Json, field: str, default: Any) -> Any:
    """`data[field]`, or `default` when it is absent or null."""
    value = data.get(field)
    return default if value is None else value


def one_of(field: str, value: Any, allowed: Iterable[Any]) -> Any:
    """`value` if it is among `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        names = ", ".join(repr(a) for a in allowed)
        raise CheckpointError(
            f"config.json: `{field}` is {value!r}, which is not supported; "
            f"supported: {names}"
        )
    return value


def refuse(data: Json, field: str, harmless: Iterable[Any] = (None, False, 0)) -> None:
    """CheckpointError naming `field` unless it is absent or off."""
    value = data.get(field)
    if value not in tuple(harmless):
        raise CheckpointError(
            f"config.json: `{field}` is {value!r}; this feature is not supported"
        )


def merged_field(data: Json, field: str, default: Any = None) -> Any:
    """A draft's `field` in any of the spellings that publishers use.

    Looked up at the top level, under `dspark_config` and `dflash_config`, each
    with and without a `dspark_` or `dflash_` prefix.

    Raises:
      CheckpointError: two spellings give different values.
    """
    found: dict[str, Any] = {}
    for place in ("", "dspark_config", "dflash_config"):
        table = data if not place else data.get(place) or {}
        for prefix in ("", "dspark_", "dflash_"):
            value = table.get(prefix + field)
            if value is not None:
                found[f"{place}.{prefix}{field}".lstrip(".")] = value
    if any(value != next(iter(found.values())) for value in found.values()):
        shown = ", ".join(f"`{name}` = {value!r}" for name, value in found.items())
        raise CheckpointError(f"config.json contradicts itself: {shown}")
    return next(iter(found.values()), default)
