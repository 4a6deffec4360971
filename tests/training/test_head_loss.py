"""The fused output head against the plain losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training.head import head_loss
from dspark_jax.training.losses import sparse_terms

ROWS, HIDDEN, RANK, VOCAB, TOP = 256, 16, 8, 512, 6


@pytest.fixture(scope="module")
def inputs():
    """Random rows; one id of each lies outside the draft's vocabulary."""
    random = np.random.default_rng(0)
    ids = np.stack([random.permutation(VOCAB)[:TOP] for _ in range(ROWS)])
    ids[:, 2] = -1
    probs = random.dirichlet(np.full(TOP + 1, 0.3), size=ROWS)[:, :TOP]
    normal = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    return {
        "hidden": normal(ROWS, HIDDEN),
        "embedded": normal(ROWS, RANK),
        "head": (0.5 * normal(VOCAB, HIDDEN)).astype(jnp.bfloat16),
        "w2": 0.5 * normal(VOCAB, RANK),
        "ids": jnp.asarray(ids, jnp.int32),
        "probs": jnp.asarray(probs, jnp.float32),
        "ce": jnp.asarray(random.random(ROWS), jnp.float32),
        "l1": jnp.asarray(random.random(ROWS), jnp.float32),
    }


def plain(x, hidden, embedded, w2):
    """The same sum through `sparse_terms` and automatic differentiation."""

    def product(a, b):
        return jax.lax.dot_general(
            a.astype(jnp.bfloat16),
            b.astype(jnp.bfloat16),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    logits = product(hidden, x["head"]) + product(embedded, w2)
    terms = sparse_terms(logits, x["ids"], x["probs"])
    return jnp.sum(x["ce"] * terms.ce + x["l1"] * terms.l1), (terms.ce, terms.l1)


def fused(x, hidden, embedded, w2):
    """The sum through `head_loss`."""
    total, ce, l1 = head_loss(
        hidden, embedded, x["head"], w2, x["ids"], x["probs"], x["ce"], x["l1"]
    )
    return total, (ce, l1)


def test_values_and_gradients(inputs):
    def run(f):
        graded = jax.value_and_grad(f, argnums=(1, 2, 3), has_aux=True)
        return graded(inputs, inputs["hidden"], inputs["embedded"], inputs["w2"])

    (want, want_terms), want_grads = run(plain)
    (have, have_terms), have_grads = run(fused)
    np.testing.assert_allclose(have, want, rtol=1e-5)
    for a, b in zip(have_terms, want_terms, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    # Gradients of the logits are rounded to bfloat16 on the way.
    for a, b in zip(have_grads, want_grads, strict=True):
        assert float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) < 5e-3


def test_gradient_scales_with_the_cotangent(inputs):
    def scaled(factor):
        return jax.grad(
            lambda h: factor * fused(inputs, h, inputs["embedded"], inputs["w2"])[0]
        )(inputs["hidden"])

    np.testing.assert_allclose(scaled(3.0), 3.0 * scaled(1.0), rtol=1e-5)
