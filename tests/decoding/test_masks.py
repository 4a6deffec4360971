"""Masks on the device: bits, logits, and one mask for a whole generation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.masks import masked, packed, packed_in_program, words_of
from dspark_jax.decoding.round import decode_round
from dspark_jax.decoding.state import new_state
from tests.decoding.serving import no_words, requests_for
from tests.models.quick import quick_jit

VOCAB, BATCH, NEW, N = 40, 6, 14, 2


@functools.cache
def model():
    """A draft that is often right, and under a mask often refused."""
    rng = np.random.default_rng(5)
    target = 2 * rng.normal(size=(VOCAB, VOCAB)).astype(np.float32)
    noise = 0.5 * rng.normal(size=(VOCAB, VOCAB)).astype(np.float32)
    return dspark.testing.scripted_model(target, target + noise, gamma=N), target


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 70])
def test_a_bit_for_every_token(vocab):
    allowed = np.random.default_rng(vocab).random((3, vocab)) < 0.5
    words = packed(allowed)
    assert words.dtype == np.uint32 and words.shape == (3, words_of(vocab))
    for row, one in zip(allowed, words.tolist(), strict=True):
        assert [one[i // 32] >> i % 32 & 1 for i in range(vocab)] == row.tolist()
    np.testing.assert_array_equal(packed_in_program(jnp.asarray(allowed)), words)
    logits = np.arange(3 * vocab, dtype=np.float32).reshape(3, vocab)
    # Bits behind the vocabulary do not matter.
    spare = ~packed(np.ones(vocab, bool))
    out = masked(model()[0].spec, jnp.asarray(logits), jnp.asarray(words | spare))
    np.testing.assert_array_equal(out, np.where(allowed, logits, -np.inf))


def allowed_rows():
    allowed = np.random.default_rng(1).random((BATCH, VOCAB)) < 0.4
    assert allowed.any(1).all()
    return allowed


SAMPLING = [
    dspark.SamplingParams(),
    # Of the tokens that are allowed: the top one of all would often be none of them.
    dspark.SamplingParams(temperature=1.0, top_k=1),
    *[dspark.SamplingParams(temperature=1.0)] * 3,
    dspark.SamplingParams(temperature=0.7, top_p=0.6, min_p=0.02),
]


def text(n, allowed, variant):
    """Tokens and scores; all requests begin with another token."""
    one, _ = model()
    seeds = np.stack([np.arange(BATCH), np.full(BATCH, 3)], 1).astype(np.uint32)
    requests = requests_for(*SAMPLING, seeds=seeds)
    tokens = jnp.arange(BATCH, dtype=jnp.int32)[:, None]

    def run(params, allowed):
        return dspark.generate_tokens(
            one.spec, params, tokens, jnp.ones((BATCH,), jnp.int32),
            max_new_tokens=NEW, draft_length=n, requests=requests, variant=variant,
            logprobs=True, allowed=allowed,
        )  # fmt: skip

    return jax.tree.map(np.asarray, quick_jit(run)(one.params, jnp.asarray(allowed)))


def greedy_reference(allowed, rows):
    """The argmax among the allowed, token by token."""
    table = model()[1]
    for row in range(rows):
        line = [row]
        for _ in range(NEW):
            line.append(int(np.where(allowed[row], table[line[-1]], -np.inf).argmax()))
        yield line[1:]


def check(out, allowed, greedy):
    for row, tokens in enumerate(out.tokens):
        assert allowed[row][tokens].all()
    wanted = list(greedy_reference(allowed, greedy))
    assert out.tokens[:greedy].tolist() == wanted
    # Log-probabilities are the target's own.
    before = np.concatenate([np.arange(BATCH)[:, None], out.tokens[:, :-1]], 1)
    scores = np.asarray(jax.nn.log_softmax(jnp.asarray(model()[1])))
    np.testing.assert_allclose(
        out.logprobs, scores[before, out.tokens], rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
def test_shared_noise_gives_one_masked_text_at_every_length():
    allowed = allowed_rows()
    plain, drafted = (text(n, allowed, "noisy") for n in (0, N))
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    check(drafted, allowed, greedy=1)
    kept, proposed = drafted.counters.kept.sum(), drafted.counters.proposed.sum()
    assert 0 < kept < proposed


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["filtered", "noisy_filtered"])
def test_filters_come_behind_the_mask(variant):
    allowed = allowed_rows()
    out = text(N, allowed, variant)
    check(out, allowed, greedy=2)
    assert out.counters.kept[2:].sum() > 0


def test_wrong_masks_are_refused_before_tracing():
    one, _ = model()
    tokens, lengths = np.ones((2, 1), np.int32), np.ones(2, np.int32)
    call = functools.partial(
        dspark.generate_tokens, one.spec, one.params, tokens, lengths, max_new_tokens=2
    )
    with pytest.raises(ValueError, match=r"must be bool\[2, 40\]"):
        call(allowed=np.ones((2, VOCAB), np.uint32))
    with pytest.raises(ValueError, match=r"must be bool\[2, 40\]"):
        call(allowed=np.ones((1, VOCAB), bool))
    empty = np.ones((2, VOCAB), bool)
    empty[1] = False
    with pytest.raises(ValueError, match=r"rows \[1\] without a token"):
        call(allowed=empty)
    state = jax.eval_shape(lambda: new_state(one.spec, 2, 8, 0, stacked=False))
    for masks in (np.ones((2, 1, 2), np.int32), np.ones((2, 2, 2), np.uint32)):
        with pytest.raises(ValueError, match=r"it must be uint32\[2, 1, 2\]"):
            decode_round(
                one.spec, one.params, state, requests_for(*SAMPLING[:2]),
                no_words(2, 0), 0, "greedy", masks=masks,
            )  # fmt: skip
