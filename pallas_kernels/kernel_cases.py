"""Every GPU kernel at shapes worth compiling and timing, without data.

Shared by the check that compiles without a GPU and the one that runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.sample import pallas_mosaic_gpu as sample
from pallas_kernels.verify import pallas_mosaic_gpu as verify
from pallas_kernels.verify.arg_specs import SHAPES, Shape


class Case(NamedTuple):
    """One op at one shape.

    name: what is compiled.
    op: a function of arrays.
    args: their shapes and dtypes, or trees of them.
    """

    name: str
    op: Callable[..., Any]
    args: tuple[Any, ...]


def cases() -> Iterator[Case]:
    """All kernels, for both logit dtypes and for a width that forbids wide loads."""
    for shape_name, dtype in (
        ("qwen3_one_request", jnp.bfloat16),
        ("qwen3_one_request", jnp.float32),
        ("gpt2_unpadded", jnp.bfloat16),
    ):
        logits = jax.ShapeDtypeStruct(SHAPES[shape_name], dtype)
        label = f"{shape_name} {jnp.dtype(dtype).name}"
        yield Case(f"verify_logits {label}", verify.verify_logits, _judged(logits))
        if shape_name != "gpt2_unpadded":
            yield Case(f"sample_logits {label}", sample.sample_logits, _drawn(logits))
    yield Case(f"argmax_ids {label}", sample.argmax_ids, (logits,))


def _drawn(logits: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = Shape(*logits.shape)
    return logits, _vector(shape, jnp.float32), _vector(shape, jnp.int32)


def _judged(logits: jax.ShapeDtypeStruct) -> tuple[jax.ShapeDtypeStruct, ...]:
    shape = Shape(*logits.shape)
    number, verdict = _vector(shape, jnp.int32), _vector(shape, jnp.bool_)
    draft_rows = jax.ShapeDtypeStruct(shape, jnp.int32)
    scale = _vector(shape, jnp.float32)
    return logits, scale, draft_rows, number, number, number, verdict, number


def _vector(shape: Shape, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((shape.rows,), dtype)
