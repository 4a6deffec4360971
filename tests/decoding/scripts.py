"""Chains of tokens as models: after token t comes `after[t]`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax as dspark
from tests.decoding.serving import requests_for
from tests.models.goldens import right_padded
from tests.models.quick import quick_jit

# Chains are decoded in batches of one shape, so that tests share programs.
BATCH, PROMPT = 8, 2


def table(after: dict[int, int], vocab: int, default: int = 0) -> np.ndarray:
    """Logits [V, V] that make `after` the only possible continuation."""
    logits = np.full((vocab, vocab), -50.0, np.float32)
    for token in range(vocab):
        logits[token, after.get(token, default)] = 50.0
    return logits


def line(*tokens: int) -> dict[int, int]:
    """Each token followed by the next."""
    return dict(zip(tokens, tokens[1:], strict=False))


def with_draft_ids(model: dspark.Model, ids: np.ndarray) -> dspark.Model:
    """The scripted model, its draft knowing only `ids`, in their order."""
    config = dataclasses.replace(model.spec.draft, draft_vocab_size=len(ids))
    draft = dict(model.params["draft"])
    markov = draft["markov"]
    draft["markov"] = {**markov, "w2": {"weight": markov["w2"]["weight"][ids]}}
    draft["lm_head"] = {"weight": draft["lm_head"]["weight"][ids]}
    draft["d2t"] = jnp.asarray(ids)
    spec = dspark.Spec(model.spec.target, config)
    return dspark.make_model(spec, {**model.params, "draft": draft})


def chain_model(
    target: dict[int, int],
    draft: dict[int, int] | None = None,
    *,
    gamma: int = 4,
    vocab: int = 16,
    **options,
) -> dspark.Model:
    """A model whose draft knows the target, except where `draft` differs."""
    drafted = {**target, **(draft or {})}
    return dspark.testing.scripted_model(
        table(target, vocab), table(drafted, vocab), gamma=gamma, **options
    )


def stopping_at(*ids: int) -> dspark.SamplingParams:
    """Greedy, with these stop ids."""
    return dspark.SamplingParams(stop_ids=ids)


STATIC = ("spec", "max_new_tokens", "draft_length", "capacity")


@functools.partial(quick_jit, static_argnames=STATIC)
def _generate(spec, params, tokens, lengths, requests, **options):
    return dspark.generate_tokens(
        spec, params, tokens, lengths, requests=requests, variant="greedy", **options
    )


def generate(model, prompts, sampling, **options) -> dspark.TokensOut:
    """Greedy generation; fewer than `BATCH` requests are filled up with copies."""
    count, width = len(prompts), max(len(p) for p in prompts)
    copies = max(BATCH - count, 0) if width <= PROMPT else 0
    prompts = [*prompts, *prompts[:1] * copies]
    tokens, lengths = right_padded(prompts)
    tokens = np.pad(np.asarray(tokens), ((0, 0), (0, max(PROMPT - width, 0))))
    requests = requests_for(*sampling, *sampling[:1] * copies)
    out = _generate(model.spec, model.params, tokens, lengths, requests, **options)
    return jax.tree.map(lambda x: np.asarray(x)[:count], out)


def byte_model(text: str, strength: float = 8.0) -> dspark.Model:
    """Bytes that mostly follow each other as in `text`, under a smooth law."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(264, 264)).astype(np.float32)
    for first, second in zip(text.encode(), text.encode()[1:], strict=False):
        logits[first, second] += strength
    return dspark.testing.scripted_model(
        logits, logits, gamma=3, tokenizer=dspark.testing.byte_tokenizer()
    )
