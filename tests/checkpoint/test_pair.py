"""Drafts against targets: what fits, what does not, what is made to fit."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.load import check_pair, fit_draft, read_config, read_params
from dspark_jax.checkpoint.vocabulary import check_vocabulary
from dspark_jax.errors import CheckpointError
from dspark_jax.models.draft.backbone import abstract_draft_params
from dspark_jax.models.params import check_tree, flatten


@pytest.fixture
def config(data_dir):
    return lambda name: read_config(data_dir / name)[1]


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("qwen3_rand/target", "qwen3_rand/draft_vanilla"),
        ("qwen3_trained/target", "qwen3_trained/draft"),
        ("gemma4_rand/target", "gemma4_rand/draft"),
    ],
)
def test_own_pairs_are_unchanged(config, target, draft):
    assert check_pair(config(target), config(draft)) == config(draft)


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ("llama_rand/target", "qwen3_rand/draft_rnn", "5 target layers.* has 4"),
        ("qwen3_rand/target", "gemma4_rand/draft", "6 target layers.* has 5"),
    ],
)
def test_wrong_draft_for_the_target(config, target, draft, message):
    with pytest.raises(CheckpointError, match=message):
        check_pair(config(target), config(draft))


def test_hidden_size_and_vocabulary_in_one_message(config):
    target = dataclasses.replace(
        config("qwen3_rand/target"), hidden_size=128, vocab_size=300
    )
    with pytest.raises(CheckpointError, match="hidden size 64.*vocabulary of 320"):
        check_pair(target, config("qwen3_rand/draft_rnn"))


def test_depth_that_a_publisher_leaves_out(speculators, config, tmp_path):
    draft = read_config(speculators.write(tmp_path))[1]
    target = config("qwen3_rand/target")
    fitted = check_pair(target, draft)
    assert fitted == dataclasses.replace(draft, num_target_layers=5)
    shallow = dataclasses.replace(target, layer_types=("full",) * 4)
    with pytest.raises(CheckpointError, match=r"target_layer_ids \[0, 2, 3\]"):
        check_pair(shallow, draft)


@pytest.fixture
def smaller(folder, tmp_path):
    """A draft over the first 300 of the target's 320 ids."""
    model = folder("qwen3_rand/draft_vanilla")
    model.config |= {"vocab_size": 300, "mask_token_id": 299}
    for name in ("embed_tokens", "lm_head", "markov_head.markov_w1"):
        table = model.tensors[f"{name}.weight"]
        model.tensors[f"{name}.weight"] = np.ascontiguousarray(table[:300])
    w2 = "markov_head.markov_w2.weight"
    model.tensors[w2] = np.ascontiguousarray(model.tensors[w2][:300])
    return model.write(tmp_path / "smaller")


def test_fr44_smaller_vocabulary_is_a_reduced_one(config, smaller):
    target = config("qwen3_rand/target")
    _, draft, params = read_params(smaller)
    fitted, changed = fit_draft(target, draft, params)
    assert fitted.draft_vocab_size == 300 and fitted.head_rows == 300
    assert fitted.backbone.vocab_size == 320
    check_tree(changed, abstract_draft_params(fitted), "draft")
    np.testing.assert_array_equal(changed["d2t"], np.arange(300))
    assert changed["d2t"].dtype == jnp.int32
    for path in (("embed", "weight"), ("markov", "w1", "weight")):
        table, before = flatten(changed)[path], flatten(params)[path]
        np.testing.assert_array_equal(table[:300], before)
        assert not np.any(table[300:])
    for path in (("lm_head", "weight"), ("markov", "w2", "weight")):
        assert flatten(changed)[path] is flatten(params)[path]


def test_fr44_valid_ids_come_from_the_target(config, smaller):
    target = dataclasses.replace(config("qwen3_rand/target"), valid_vocab=310)
    fitted = check_pair(target, read_config(smaller)[1])
    assert fitted.backbone.valid_vocab == 310


def test_fr44_other_mismatches_are_refused(config, smaller):
    draft = read_config(smaller)[1]
    target = config("qwen3_rand/target")
    without_head = dataclasses.replace(draft, own_head=False)
    with pytest.raises(CheckpointError, match="without an output head"):
        check_pair(target, without_head)
    with pytest.raises(CheckpointError, match="vocabulary of 300.* has only 299"):
        check_pair(dataclasses.replace(target, vocab_size=299), draft)


def test_equal_vocabularies_leave_parameters_alone(config, data_dir):
    _, draft, params = read_params(data_dir / "qwen3_rand/draft_rnn")
    fitted, same = fit_draft(config("qwen3_rand/target"), draft, params)
    assert fitted == draft and same is params


def test_check_vocabulary(config):
    target = config("qwen3_rand/target")
    assert check_vocabulary(target, None) is target
    assert check_vocabulary(target, 320) is target
    assert check_vocabulary(target, 13).valid_vocab == 13
    with pytest.raises(
        CheckpointError, match="320 is smaller than the tokenizer's 321"
    ):
        check_vocabulary(target, 321)
