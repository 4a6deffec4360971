"""`config.json` of every layout and spelling, and what is refused."""

import copy
import json

import pytest

from dspark_jax.checkpoint.hf_config import parse_config
from dspark_jax.checkpoint.hf_draft import UNSTATED_LAYERS
from dspark_jax.config import AttentionConfig, RopeConfig
from dspark_jax.errors import CheckpointError
from dspark_jax.models.draft.backbone import abstract_draft_params

DRAFT_NAMES = ("embed_tokens.weight", "lm_head.weight", "confidence_head.proj.weight")


@pytest.fixture
def golden(data_dir):
    return lambda name: json.loads((data_dir / name / "config.json").read_text())


def changed(data, **fields):
    return {**copy.deepcopy(data), **fields}


def without(data, *fields):
    return {key: value for key, value in data.items() if key not in fields}


def test_llama_target(golden):
    kind, config = parse_config(golden("llama_rand/target"))
    assert kind == "target"
    assert config.architecture == "llama"
    assert config.num_layers == 4 and config.intermediate_size == 160
    assert config.tie_embeddings and not config.qk_norm
    rope = RopeConfig(theta=1e5)
    assert config.full == AttentionConfig(num_kv_heads=2, head_dim=16, rope=rope)
    assert config.rms_norm_eps == 1e-5
    assert config.eos_ids == (0,)
    assert config.dtype == "float32"


def test_qwen3_targets(golden):
    _, untied = parse_config(golden("qwen3_rand/target"))
    _, tied = parse_config(golden("qwen3_trained/target"))
    assert untied.qk_norm and not untied.tie_embeddings and tied.tie_embeddings
    assert untied.full.rope.theta == 1e6 and tied.full.rope.theta == 1e4


def test_gemma4_target(golden):
    _, config = parse_config(golden("gemma4_rand/target"))
    s, f = "sliding", "full"
    assert config.layer_types == (s, s, f, s, s, f)
    assert config.sliding == AttentionConfig(
        num_kv_heads=2, head_dim=16, rope=RopeConfig(theta=1e4), window=8
    )
    assert config.full == AttentionConfig(
        num_kv_heads=1,
        head_dim=32,
        rope=RopeConfig(theta=1e6, kind="proportional", partial=0.25),
        k_eq_v=True,
    )
    assert config.logit_softcap == 30.0 and config.tie_embeddings


@pytest.mark.parametrize(
    ("name", "head", "ids", "gamma", "confidence", "with_markov"),
    [
        ("qwen3_rand/draft_vanilla", "vanilla", (0, 2, 3), 7, True, True),
        ("qwen3_rand/draft_gated", "gated", (-1, 1, 3), 5, True, True),
        ("qwen3_rand/draft_rnn", "rnn", (1, 3), 6, True, True),
        ("qwen3_rand/draft_dflash", "none", (0, 2, 3), 7, False, False),
        ("qwen3_rand/draft_dflash_conf", "none", (0, 1, 2, 3), 7, True, False),
        ("qwen3_trained/draft", "vanilla", (0, 2, 3), 7, True, True),
        ("gemma4_rand/draft", "vanilla", (-1, 1, 3), 6, True, True),
    ],
)
def test_drafts(golden, name, head, ids, gamma, confidence, with_markov):
    kind, config = parse_config(golden(name), DRAFT_NAMES)
    assert kind == "draft"
    assert config.markov_head == head
    assert config.markov_rank == (0 if head == "none" else 16)
    assert config.target_layer_ids == ids
    assert config.gamma == gamma and config.sample_from_anchor
    assert config.confidence == confidence
    assert config.confidence_with_markov == with_markov
    assert config.num_target_layers == (6 if "gemma" in name else 5)
    assert config.own_embed and config.own_head
    assert config.backbone.layer_types == ("full", "full")


def test_gemma4_draft_uses_the_global_geometry(golden):
    _, config = parse_config(golden("gemma4_rand/draft"))
    assert config.backbone.architecture == "gemma4"
    assert config.backbone.full.head_dim == 32
    assert config.backbone.full.k_eq_v
    # Entries beside the per-type ones are null in this file.
    assert config.backbone.full.rope.theta == 1e6


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_type": "linear", "factor": 4.0}, RopeConfig(5e5, "linear", 4.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            RopeConfig(5e5, "llama3", 8.0, original_max_position=8192),
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "beta_fast": 16.0,
                "attention_factor": 1.2,
            },
            RopeConfig(
                5e5,
                "yarn",
                4.0,
                original_max_position=32768,
                beta_fast=16.0,
                attention_factor=1.2,
            ),
        ),
    ],
)
def test_rope_spellings_agree(golden, fields, rope):
    base = without(golden("llama_rand/target"), "rope_parameters")
    new = changed(base, rope_parameters={"rope_theta": 5e5, **fields})
    typed = {"full_attention": {"rope_theta": 5e5, **fields}}
    per_type = changed(base, rope_parameters=typed)
    old = changed(base, rope_theta=5e5, rope_scaling=fields)
    legacy = {"type": fields["rope_type"], **without(fields, "rope_type")}
    oldest = changed(base, rope_theta=5e5, rope_scaling=legacy)
    for data in (new, per_type, old, oldest):
        assert parse_config(data)[1].full.rope == rope


def test_multimodal_nesting_changes_nothing(golden):
    flat = golden("gemma4_rand/target")
    nested = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": without(flat, "architectures", "tie_word_embeddings"),
        "vision_config": {"hidden_size": 8},
        "tie_word_embeddings": True,
    }
    assert parse_config(nested) == parse_config(flat)


def test_per_layer_config_changes_nothing(golden):
    flat = golden("gemma4_rand/target")
    folded = without(flat, "global_head_dim", "num_global_key_value_heads")
    override = {"head_dim": 32, "num_key_value_heads": 1}
    folded["per_layer_config"] = {"02": override, "5": override}
    assert parse_config(folded) == parse_config(flat)
    folded["per_layer_config"]["5"] = {"head_dim": 16, "num_key_value_heads": 1}
    with pytest.raises(CheckpointError, match="differs between the full_attention"):
        parse_config(folded)


def test_fr20_windows_survive(golden):
    data = changed(
        golden("qwen3_rand/target"),
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=2048,
        use_sliding_window=True,
    )
    _, config = parse_config(data)
    assert config.layer_types == ("sliding", "full")
    assert config.sliding.window == 2048 and config.full.window is None
    _, by_rule = parse_config(
        changed(without(data, "layer_types"), max_window_layers=1)
    )
    assert by_rule.layer_types == ("full", "sliding")


def test_fr20_unknown_layer_type_raises(golden):
    types = ["full_attention"] * 4 + ["chunked_attention"]
    data = changed(golden("qwen3_rand/target"), layer_types=types)
    with pytest.raises(CheckpointError, match="chunked_attention"):
        parse_config(data)


HEADS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "target_layer_ids",
    "mask_token_id",
    "block_size",
)


def nested_heads(data, place, prefix=""):
    moved = {prefix + key: data[key] for key in HEADS}
    rest = without(data, *HEADS)
    return changed(rest, **{place: moved}) if place else changed(rest, **moved)


@pytest.mark.parametrize("name", ["draft_vanilla", "draft_gated", "draft_rnn"])
def test_fr21_nested_switches_make_the_same_tree(golden, name):
    flat = golden(f"qwen3_rand/{name}")
    _, config = parse_config(flat, DRAFT_NAMES)
    for data in (
        nested_heads(flat, "dspark_config"),
        nested_heads(flat, "dflash_config"),
        nested_heads(flat, "", "dspark_"),
    ):
        _, other = parse_config(data, DRAFT_NAMES)
        assert other == config
        assert abstract_draft_params(other) == abstract_draft_params(config)


def test_fr21_conflicting_values_raise(golden):
    flat = golden("qwen3_rand/draft_vanilla")
    same = changed(flat, dspark_config={"markov_rank": 16})
    assert parse_config(same) == parse_config(flat)
    for field, value in (("markov_rank", 8), ("enable_confidence_head", False)):
        with pytest.raises(CheckpointError, match=f"contradicts.*{field}"):
            parse_config(changed(flat, dspark_config={field: value}))


def test_speculators_layout(speculators):
    _, config = parse_config(speculators.config, ["lm_head.weight"])
    # Entry 0 of their tuple is the embedding.
    assert config.target_layer_ids == (0, 2, 3)
    assert config.sample_from_anchor and config.gamma == 7
    assert config.draft_vocab_size == 40 and config.backbone.vocab_size == 320
    assert config.num_target_layers == UNSTATED_LAYERS
    assert not config.own_embed and config.own_head


def test_speculators_dflash_drops_the_anchor_row(speculators):
    data = changed(
        without(speculators.config, "markov_rank", "markov_head_type"),
        speculators_model_type="dflash",
        enable_confidence_head=False,
        confidence_head_with_markov=False,
    )
    _, config = parse_config(data, ["lm_head.weight"])
    assert config.markov_head == "none" and not config.confidence
    assert not config.sample_from_anchor and config.gamma == 6


def test_speculators_full_vocabulary_is_not_reduced(speculators):
    data = changed(speculators.config, draft_vocab_size=320)
    assert parse_config(data)[1].draft_vocab_size is None


def test_original_dflash(golden):
    data = nested_heads(
        golden("qwen3_rand/draft_dflash_conf")
        | {
            "markov_head_type": None,
            "enable_confidence_head": None,
            "confidence_head_with_markov": None,
        },
        "dflash_config",
    )
    data["architectures"] = ["DFlashDraftModel"]
    _, config = parse_config(data)
    assert not config.sample_from_anchor and config.gamma == 6
    assert not config.own_embed and not config.own_head


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama_rand/target", {"architectures": ["OPTForCausalLM"]}, "OPTForCausalLM"),
        (
            "llama_rand/target",
            {"rope_parameters": {"rope_type": "longrope"}},
            "longrope",
        ),
        ("llama_rand/target", {"hidden_act": "relu"}, "relu"),
        ("llama_rand/target", {"hidden_size": None}, "no `hidden_size`"),
        ("llama_rand/target", {"num_attention_heads": 3}, "num_heads"),
        ("llama_rand/target", {"head_dim": 15}, "head_dim"),
        ("qwen3_rand/target", {"layer_types": ["full_attention"]}, "1 entries"),
        ("gemma4_rand/target", {"enable_moe_block": True}, "enable_moe_block"),
        ("gemma4_rand/target", {"num_experts": 8}, "num_experts"),
        ("gemma4_rand/target", {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ("gemma4_rand/target", {"use_double_wide_mlp": True}, "use_double_wide_mlp"),
        (
            "gemma4_rand/target",
            {"hidden_size_per_layer_input": 16},
            "hidden_size_per_layer_input",
        ),
        ("gemma4_rand/target", {"use_bidirectional_attention": "all"}, "bidirectional"),
        ("gemma4_rand/target", {"sliding_window": None}, "no `sliding_window`"),
        ("qwen3_rand/draft_rnn", {"markov_head_type": "lstm"}, "lstm"),
        ("qwen3_rand/draft_rnn", {"target_layer_ids": [1, 4]}, "target_layer_ids"),
        ("qwen3_rand/draft_rnn", {"mask_token_id": 320}, "mask_token_id"),
        ("qwen3_rand/draft_rnn", {"target_layer_ids": None}, "target_layer_ids"),
        (
            "qwen3_rand/draft_dflash_conf",
            {"confidence_head_with_markov": True},
            "confidence_head_with_markov",
        ),
    ],
)
def test_refused_by_name(golden, name, fields, message):
    with pytest.raises(CheckpointError, match=message):
        parse_config(changed(golden(name), **fields))


def test_speculators_correction_head_is_refused(speculators):
    data = changed(speculators.config, enable_correction_head=True)
    with pytest.raises(CheckpointError, match="enable_correction_head"):
        parse_config(data)
