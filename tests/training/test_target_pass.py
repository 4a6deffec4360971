"""Wide passes of a target against its step-by-step evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.models import dense, kv_cache
from dspark_jax.models.rows import dense_rows
from dspark_jax.training.target_pass import annotate, fields, hidden_states
from tests.training.conftest import target_of
from tests.training.test_losses import close

TAPS = (-1, 0, 1)


def in_steps(config, params, tokens):
    """(features, logits) of every position through `dense.evaluate`."""
    batch, length = tokens.shape
    cache = kv_cache.empty_cache(config, batch, 64, jnp.float32, True)
    rows = dense_rows(
        jnp.asarray(tokens), jnp.full((batch,), length, jnp.int32),
        jnp.zeros((batch,), jnp.int32),
    )  # fmt: skip
    evaluate = jax.jit(dense.evaluate, static_argnums=(0, 3, 5))
    logits, features, _ = evaluate(config, params, cache, 64, rows, TAPS)
    shape = (batch, length, -1)
    return np.asarray(features).reshape(shape), np.asarray(logits).reshape(shape)


@pytest.mark.parametrize(
    "architecture",
    [
        "qwen3",
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("gemma4", marks=pytest.mark.slow),
    ],
)
def test_wide_pass_equals_evaluation(architecture):
    config, params = target_of(architecture, layers=3)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 24)).astype(np.int32)
    want_features, want_logits = in_steps(config, params, tokens)
    features, hidden = jax.jit(hidden_states, static_argnums=(0, 3))(
        config, params, tokens, TAPS
    )
    close(features.astype(jnp.float32), want_features, 5e-3)  # bfloat16
    flat = hidden.reshape(-1, hidden.shape[-1])
    logits = dense.head_logits(config, flat, dense.head_table(params))
    close(logits.reshape(want_logits.shape), want_logits, 1e-4)

    top = annotate(config, params, tokens, TAPS, 5)
    law = np.asarray(jax.nn.softmax(want_logits, axis=-1))
    order = np.argsort(-law, axis=-1, kind="stable")[..., :5]
    np.testing.assert_array_equal(top["top_ids"], order)
    np.testing.assert_allclose(
        np.exp(np.asarray(top["top_logs"], np.float32)),
        np.take_along_axis(law, order, axis=-1),
        rtol=6e-3, atol=1e-6,
    )  # fmt: skip
    for name, (width, dtype) in fields(config, TAPS, 5).items():
        assert top[name].shape == (2, 24, width)
        assert top[name].dtype == jnp.dtype(dtype)
    exact = annotate(config, params, tokens, TAPS, 0)
    close(exact["hidden"].astype(jnp.float32), hidden, 5e-3)
    assert set(exact) == set(fields(config, TAPS, 0))
