"""One of several processes, or the only one; `test_two_processes` starts it.

    python -m tests.deepseek_v4.worker MODEL REPORT DATA TENSOR [COUNT INDEX ADDRESS]

Writes a JSON report, as collectives print to the standard output.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import dspark_jax as dspark
from dspark_jax.models.params import flatten, unflatten

AUTO = jax.sharding.AxisType.Auto
NEW, PROMPTS = 8, ["hello", "yes", "0123"]


@functools.partial(jax.jit, static_argnums=0)
def tokens_of(spec, params, tokens, lengths):
    out = dspark.generate_tokens(spec, params, tokens, lengths, max_new_tokens=NEW)
    return out.tokens


def greedy(model, params):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (2, 14)).astype(np.int32)
    out = tokens_of(model.spec, params, tokens, np.asarray([14, 9], np.int32))
    return multihost_utils.process_allgather(out, tiled=True).tolist()


def with_experts_moved(params):
    """Every expert's weights at a place on the other half of the devices."""

    def moved(x):
        half = len(x) // 2
        return jax.jit(lambda x: jnp.roll(x, half, 0), out_shardings=x.sharding)(x)

    flat = flatten(params)
    return unflatten({k: moved(x) if "experts" in k else x for k, x in flat.items()})


def text(model, batch):
    """Greedy, drawn from a given seed, drawn from one that nobody gave."""
    sampling = [
        dspark.SamplingParams(),
        dspark.SamplingParams(temperature=4.0, seed=3),
        dspark.SamplingParams(temperature=4.0),
    ]
    outs = dspark.generate(
        model,
        PROMPTS,
        chat=False,
        max_new_tokens=NEW,
        sampling=sampling,
        batch=batch,
        trace=True,
    )
    kept = sum(log.accepted for out in outs for log in out.rounds)
    return [out.tokens for out in outs], kept


def refusal(model):
    try:
        dspark.generate(model, "a", chat=False, policy=dspark.Budget())
    except ValueError as error:
        return str(error)
    return ""


def main(folder, report, data, tensor, count="1", index="0", address=""):
    if address:
        jax.distributed.initialize(address, int(count), int(index))
    shape = int(data), int(tensor)
    mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(AUTO, AUTO))
    model = dspark.load(folder, mesh=mesh)
    # By itself it says what one device does, and its mesh is of simulated ones.
    plain = model if address else dspark.load(folder)
    experts = {
        "/".join(path): [
            [*s.index[0].indices(len(x))][:2] for s in x.addressable_shards
        ]
        for part in model.params.values()
        for path, x in flatten(part).items()
        if "experts" in path
    }
    written, kept = text(model, int(data))
    found = {
        "experts": experts,
        "greedy": greedy(plain, plain.params),
        "moved": greedy(plain, with_experts_moved(plain.params)),
        "text": written,
        "kept": kept,
        "refusal": refusal(model),
    }
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
