"""Compiling quickly: most of the time of these tests goes into it."""

import functools

import jax

# Machine code without LLVM's optimisations takes half the time to compile. The
# programs of `Model.programs`, which `generate` uses, are compiled as for users.
quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)
