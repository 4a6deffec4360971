"""One small model and one compile table for all tests of the host loop."""

import dataclasses
import functools
import importlib

import jax
import numpy as np
import pytest

import dspark_jax as dspark
from dspark_jax.decoding.programs import Programs
from dspark_jax.settings import Buckets
from dspark_jax.testing import tiny_config, tiny_draft_config, tiny_model


@dataclasses.dataclass(frozen=True)
class FewBuckets(Buckets):
    """Two batch sizes, so that few programs serve all tests."""

    batch: tuple[int, ...] = (1, 8)


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch):
    # `dspark_jax.generate` is the function; its module has to be asked for.
    names = ("dspark_jax.generate", "dspark_jax.run", "dspark_jax.decoding.feeding")
    for name in names:
        monkeypatch.setattr(importlib.import_module(name), "Buckets", FewBuckets)
    return FewBuckets()


@pytest.fixture
def launched(monkeypatch):
    """One entry for every round launched."""
    rounds = []

    def counted(self, *args):
        rounds.append(None)
        return original(self, *args)

    original = Programs.round
    monkeypatch.setattr(Programs, "round", counted)
    return rounds


def small_model(seed: int = 0) -> dspark.Model:
    config = tiny_config(layers=1, hidden_size=16, num_heads=2, num_kv_heads=1)
    # Only ASCII is ever generated: one token is one character.
    config = dataclasses.replace(config, valid_vocab=128)
    draft = tiny_draft_config(config, gamma=2)
    return tiny_model(seed=seed, scale=4.0, target=config, draft=draft)


@pytest.fixture(scope="session")
def model() -> dspark.Model:
    return small_model()


@pytest.fixture(scope="session")
def plain(model):
    """plain(prompts, count): greedy ids by the one-program loop, no draft."""
    batch, longest, most = 8, 64, 24

    @jax.jit
    def run(params, tokens, lengths):
        return dspark.generate_tokens(
            model.spec,
            params,
            tokens,
            lengths,
            max_new_tokens=most,
            draft_length=0,
        ).tokens

    @functools.cache
    def one(ids: tuple[int, ...]) -> list[int]:
        tokens = np.zeros((batch, longest), np.int32)
        tokens[0, : len(ids)] = ids
        lengths = np.ones(batch, np.int32)
        lengths[0] = len(ids)
        return np.asarray(run(model.params, tokens, lengths))[0].tolist()

    def many(prompts, count):
        rows = [p.encode() if isinstance(p, str) else p for p in prompts]
        return [one(tuple(row))[:count] for row in rows]

    return many
