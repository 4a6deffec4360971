"""A tiny target and text that it never wrote: enough to train on."""

import dataclasses

import jax
import numpy as np
import pytest

from dspark_jax.models import dense
from dspark_jax.models.params import random_params
from dspark_jax.testing.tiny import tiny_config
from dspark_jax.training.sequences import ANSWER, FORCED, Sequences
from dspark_jax.training.settings import DraftShape, TrainConfig

LENGTH = 40


def target_of(architecture="qwen3", layers=2):
    """(config, params) of a tiny target."""
    config = tiny_config(architecture, layers=layers)
    params = random_params(dense.abstract_params(config), jax.random.key(0), 3.0)
    return config, params


def text_of(count, seed=0):
    """Random text: a forced head, then answers, at temperatures 0 and 1."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 200, (count, LENGTH)).astype(np.int32)
    role = np.full((count, LENGTH), ANSWER, np.uint8)
    role[:, :6] = FORCED
    return Sequences(tokens, role, np.resize([0.0, 1.0], count).astype(np.float32))


# Reduced vocabulary, sparse supervision, layers from the target: the recipe's path.
RECIPE = TrainConfig(
    draft=DraftShape(
        layers=1,
        block_size=3,
        taps=(-1, 0),
        num_kv_heads=4,
        markov_rank=8,
        vocab_size=256,
    ),
    steps=6,
    sequences=2,
    anchors=4,
    rate=1e-2,
    warmup=2,
    schedule="constant",
    cooldown=2,
    ce_start=1.0,
    ce_steps=4,
    soft_labels=True,
    top=8,
    start="target",
    bigram_steps=4,
    average=0.9,
    seed=3,
)
# The whole law of the target, labels that were drawn, everything in float32.
EXACT = dataclasses.replace(
    RECIPE,
    draft=dataclasses.replace(RECIPE.draft, vocab_size=None, num_kv_heads=None),
    soft_labels=False,
    top=0,
    start="random",
    bigram_steps=0,
    average=0.0,
    dtype="float32",
)


@pytest.fixture(scope="session")
def target():
    return target_of()


@pytest.fixture(scope="session")
def text():
    return text_of(14)
