"""Chains of tokens as models: after token t comes `after[t]`."""

import numpy as np

import dspark_jax as dspark


def table(after: dict[int, int], vocab: int, default: int = 0) -> np.ndarray:
    """Logits [V, V] that make `after` the only possible continuation."""
    logits = np.full((vocab, vocab), -50.0, np.float32)
    for token in range(vocab):
        logits[token, after.get(token, default)] = 50.0
    return logits


def line(*tokens: int) -> dict[int, int]:
    """Each token followed by the next."""
    return dict(zip(tokens, tokens[1:], strict=False))


def chain_model(
    target: dict[int, int],
    draft: dict[int, int] | None = None,
    *,
    gamma: int = 3,
    vocab: int = 16,
    **options,
) -> dspark.Model:
    """A model whose draft knows the target, except where `draft` differs."""
    drafted = {**target, **(draft or {})}
    return dspark.testing.scripted_model(
        table(target, vocab), table(drafted, vocab), gamma=gamma, **options
    )


def byte_model(text: str, strength: float = 8.0) -> dspark.Model:
    """Bytes that mostly follow each other as in `text`, under a smooth law."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(264, 264)).astype(np.float32)
    for first, second in zip(text.encode(), text.encode()[1:], strict=False):
        logits[first, second] += strength
    return dspark.testing.scripted_model(
        logits, logits, gamma=3, tokenizer=dspark.testing.byte_tokenizer()
    )
