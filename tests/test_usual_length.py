"""A draft may say how many of its drafts are worth a round."""

import dataclasses

import pytest

import dspark_jax as dspark
from dspark_jax.config import to_json
from dspark_jax.config_draft import draft_from_json
from dspark_jax.decoding.plans import policy_length
from dspark_jax.scheduling.policy import Budget, Threshold

TARGET = dspark.testing.tiny_config("qwen3")
DRAFT = dspark.testing.tiny_draft_config(TARGET, gamma=4)


def spec_of(usual):
    return dspark.Spec(TARGET, dataclasses.replace(DRAFT, usual_length=usual))


def test_it_holds_where_nothing_else_is_asked_for():
    spec = spec_of(2)
    assert spec.gamma == 4 and spec.check_draft_length(None) == 2
    assert [spec.check_draft_length(n) for n in (0, 1, 3, 4)] == [0, 1, 3, 4]
    assert policy_length(spec, Budget(), None)[0] == 2
    assert policy_length(spec, Threshold(4), None)[0] == 4
    assert policy_length(spec, Budget(), 3)[0] == 3
    assert spec_of(None).check_draft_length(None) == 4
    # Attention is as wide as before: bits do not depend on it.
    assert spec.width == spec_of(None).width


def test_it_is_stored():
    config = spec_of(3).draft
    data = to_json(config)
    assert draft_from_json(data) == config
    del data["usual_length"]
    assert draft_from_json(data).usual_length is None


@pytest.mark.parametrize("usual", [0, 5, 2.0, True])
def test_lengths_that_it_does_not_have(usual):
    with pytest.raises(ValueError, match="usual_length"):
        spec_of(usual)
