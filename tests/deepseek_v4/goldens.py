"""Recorded runs of small DeepSeek-V4 models, and how to replay them.

Model "a" has layers of all kinds with ratios 0, 4 and 16, a window of 8 and a draft of
three stages; "b" has the published ratios and window, without a draft.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.checkpoint.load import read_params
from dspark_jax.models import deepseek_v4
from dspark_jax.models.rows import dense_rows
from tests.models.quick import quick_jit

DATA = Path(__file__).parent.parent / "data" / "deepseek_v4"
FLOAT = jnp.dtype("float32")
# Largest |difference| from the recorded float32 numbers.
LIMIT = 5e-5


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """The arrays of `tests/data/deepseek_v4/<name>.npz`."""
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


@functools.cache
def target(name: str = "a"):
    """(config, parameters) through the library's own reader."""
    _, config, params = read_params(DATA / name)
    return config, params


@functools.cache
def draft():
    """(config, parameters) of model a's draft."""
    _, config, params = read_params(DATA / "a", part="draft")
    return config, params


def difference(ours, reference) -> float:
    """Largest |difference|; shapes must agree."""
    ours, reference = np.asarray(ours), np.asarray(reference)
    assert ours.shape == reference.shape
    return float(np.abs(ours - reference).max(initial=0.0))


@functools.partial(quick_jit, static_argnums=(0, 3, 4))
def _step(config, params, state, capacity, taps, tokens, lengths, start):
    rows = dense_rows(tokens, lengths, start)
    logits, features, pending = deepseek_v4.evaluate(
        config, params, state, capacity, rows, taps
    )
    state = deepseek_v4.commit(config, state, pending, start, lengths)
    shape = (*tokens.shape, -1)
    return logits.reshape(shape), features.reshape(shape), state


class Runner:
    """One request fed in pieces, through one compiled program a piece size."""

    def __init__(self, name: str = "a", capacity: int = 96, config=None, params=None):
        found = target(name)
        self.config, self.params = config or found[0], params or found[1]
        self.capacity = capacity
        self.taps = tuple(range(self.config.num_layers))
        self.state = deepseek_v4.empty_state(self.config, 1, capacity, FLOAT)
        self.length = 0

    def feed(self, ids, pad: int | None = None):
        """(logits [n, V], stream means [n, layers, H]) of tokens, all committed.

        `pad` adds rows that are not real.
        """
        count, width = len(ids), max(pad or len(ids), 2)
        block = np.zeros((1, width), np.int32)
        block[0, :count] = ids
        lengths = jnp.asarray([count], jnp.int32)
        start = jnp.asarray([self.length], jnp.int32)
        logits, features, self.state = _step(
            self.config, self.params, self.state, self.capacity, self.taps,
            jnp.asarray(block), lengths, start,
        )  # fmt: skip
        self.length += count
        features = features[0, :count].reshape(count, len(self.taps), -1)
        return np.asarray(logits[0, :count]), np.asarray(features)

    def host_state(self):
        """The state as numpy arrays without the request axis."""
        return jax.tree.map(lambda x: np.asarray(x)[0], self.state)
