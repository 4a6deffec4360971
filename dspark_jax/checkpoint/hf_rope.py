"""Rotary embedding settings of a `config.json`, in both spellings.

New files write `rope_parameters` (flat, or one entry a layer type), old ones
`rope_theta` with `rope_scaling`.
"""

from __future__ import annotations

from dspark_jax.checkpoint.hf_fields import Json, one_of, required, value_or
from dspark_jax.config import RopeConfig
from dspark_jax.errors import CheckpointError

KINDS = ("default", "linear", "llama3", "yarn", "proportional")
LAYER_TYPES = ("full_attention", "sliding_attention")


def rope_config(
    data: Json, layer_type: str, default_theta: float, max_position: int
) -> RopeConfig:
    """The rotary embedding of one layer type.

    Args:
      data: the (text) config.
      layer_type: `full_attention` or `sliding_attention`.
      default_theta: the architecture's base when the file has none.
      max_position: fills in for an absent original context length.

    Raises:
      CheckpointError: a rule that is not supported, by name.
    """
    fields = _fields(data, layer_type)
    kind = value_or(fields, "rope_type", value_or(fields, "type", "default"))
    one_of("rope_type", kind, KINDS)
    theta = float(value_or(fields, "rope_theta", default_theta))
    partial = float(
        value_or(
            fields,
            "partial_rotary_factor",
            value_or(data, "partial_rotary_factor", 1.0),
        )
    )
    if kind != "proportional" and partial != 1.0:
        raise CheckpointError(
            f"config.json: `partial_rotary_factor` is {partial} with rope type "
            f"{kind!r}; it is supported for 'proportional' only"
        )
    try:
        return _build(kind, theta, partial, fields, data, max_position)
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: rope of {layer_type}: {error}") from error


def _fields(data: Json, layer_type: str) -> Json:
    table = data.get("rope_parameters") or {}
    if any(isinstance(table.get(name), dict) for name in LAYER_TYPES):
        # Entries beside the per-type ones are left over from a conversion.
        return table.get(layer_type) or {}
    if table:
        return {"rope_theta": data.get("rope_theta"), **table}
    return {**(data.get("rope_scaling") or {}), **_old_theta(data, layer_type)}


def _old_theta(data: Json, layer_type: str) -> Json:
    local = data.get("rope_local_base_freq")
    if layer_type == "sliding_attention" and local is not None:
        return {"rope_theta": local, "rope_type": "default"}
    theta = data.get("rope_theta")
    return {} if theta is None else {"rope_theta": theta}


def _build(
    kind: str, theta: float, partial: float, fields: Json, data: Json, max_position: int
) -> RopeConfig:
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "proportional":
        factor = float(value_or(fields, "factor", 1.0))
        return RopeConfig(
            theta=theta, kind="proportional", factor=factor, partial=partial
        )
    original = int(
        value_or(
            fields,
            "original_max_position_embeddings",
            value_or(data, "original_max_position_embeddings", max_position),
        )
    )
    if kind == "linear":
        return RopeConfig(
            theta=theta, kind="linear", factor=float(required(fields, "factor"))
        )
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=float(required(fields, "factor")),
            low_freq_factor=float(required(fields, "low_freq_factor")),
            high_freq_factor=float(required(fields, "high_freq_factor")),
            original_max_position=original,
        )
    for field in ("mscale", "mscale_all_dim"):
        if fields.get(field) is not None:
            raise CheckpointError(
                f"config.json: `{field}` of rope type 'yarn' is not supported"
            )
    attention = fields.get("attention_factor")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=float(value_or(fields, "factor", max_position / original)),
        original_max_position=original,
        beta_fast=float(value_or(fields, "beta_fast", 32.0)),
        beta_slow=float(value_or(fields, "beta_slow", 1.0)),
        attention_factor=None if attention is None else float(attention),
        truncate=bool(value_or(fields, "truncate", True)),
    )
