"""Kernels in interpret mode beside their references; needs jax >= 0.11.2."""

import functools

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels as pk
from pallas_kernels.sample import pallas_mosaic_gpu as sample_kernels
from pallas_kernels.sample import reference as sample_reference
from pallas_kernels.verify import pallas_mosaic_gpu as verify_kernels
from pallas_kernels.verify import reference as verify_reference

KERNELS = {
    "verify": (verify_kernels.verify_logits, verify_reference.verify_logits),
    "sample": (sample_kernels.sample_logits, sample_reference.sample_logits),
}


def check(op, args, tuning, total=pk.TOTAL):
    """Asserts that a kernel and its reference give the same bits.

    `args` are those of `verify_logits`, from which "sample" takes its own.
    """
    kernel, reference = KERNELS[op]
    if op == "sample":
        args = (args[0], args[1], args[-1])
    kernel = functools.partial(
        kernel,
        total=total,
        tuning=tuning,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    got = jax.jit(kernel)(*args)
    expected = jax.jit(functools.partial(reference, total=total))(*args)
    for name, a, b in zip(expected._fields, got, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, name)
    return expected
