"""Freshly made random models of `transformers` against ours (extra `parity`).

Unlike the recorded data these cover settings that the checkpoints there lack, and
show that our readers understand what the installed version writes.
"""

import importlib.util
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.load import read_params
from dspark_jax.models import dense
from dspark_jax.models.kv_cache import empty_cache
from dspark_jax.models.rows import dense_rows
from tests.models.goldens import error
from tests.models.quick import quick_jit

_missing = [m for m in ("torch", "transformers") if not importlib.util.find_spec(m)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(_missing),
        reason=f"{' and '.join(_missing)} not installed; install the extra `parity`",
    ),
    # Third-party code warns about itself.
    pytest.mark.filterwarnings("ignore"),
]

LENGTH = 23
SMALL = dict(
    vocab_size=160,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    initializer_range=0.2,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=64,
)
CASES = {
    "llama": ("Llama", {}),
    "llama_tied_biased": (
        "Llama",
        dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "llama_llama3_rope": ("Llama", dict(rope_parameters=LLAMA3)),
    "qwen3": ("Qwen3", {}),
    "qwen3_yarn_tied": (
        "Qwen3",
        dict(rope_parameters=YARN, tie_word_embeddings=True),
    ),
    "gemma4": (
        "Gemma4Text",
        dict(
            num_hidden_layers=4,
            global_head_dim=32,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=6,
            final_logit_softcapping=30.0,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=160,
            num_kv_shared_layers=0,
            enable_moe_block=False,
        ),
    ),
}


@pytest.fixture(scope="module")
def torch():
    import torch

    torch.set_num_threads(2)
    torch.manual_seed(0)
    return torch


def make(torch, case):
    """A random model, with gains and biases that are not 1 and 0."""
    import transformers

    family, options = CASES[case]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = getattr(transformers, f"{family}Config")(
        **{**SMALL, **options}, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    name = family.removesuffix("Text")
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_and_hidden_states(torch, case, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make(torch, case)
        model.save_pretrained(tmp_path)
        ids = np.random.default_rng(0).integers(3, 150, (2, LENGTH)).astype(np.int32)
        with torch.no_grad():
            out = model(torch.from_numpy(ids).long(), output_hidden_states=True)
    logits = out.logits.numpy()
    hidden = np.stack([h.numpy() for h in out.hidden_states])[:-1]

    kind, config, params = read_params(tmp_path, dtype="float32")
    assert kind == "target"
    taps = tuple(range(-1, config.num_layers - 1))

    @quick_jit
    def run(params, ids):
        cache = empty_cache(config, 2, LENGTH, jnp.dtype("float32"), True)
        start = jnp.zeros((2,), jnp.int32)
        rows = dense_rows(ids, start + LENGTH, start)
        logits, features, _ = dense.evaluate(config, params, cache, LENGTH, rows, taps)
        return logits, features

    ours, features = jax.tree.map(np.asarray, run(params, ids))
    limit = 2e-4 if "gemma4" in case else 5e-5
    assert error(ours.reshape(logits.shape), logits) <= limit
    features = features.reshape(2, LENGTH, len(taps), -1).transpose(2, 0, 1, 3)
    for layer, (mine, theirs) in enumerate(zip(features, hidden, strict=True)):
        assert error(mine, theirs) <= limit, f"layer {layer - 1}"


def test_greedy_text(torch, tmp_path):
    """Token by token, through `load` and the loop."""
    import dspark_jax as dspark

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make(torch, "qwen3")
        model.save_pretrained(tmp_path)
        prompt = np.random.default_rng(1).integers(3, 150, (1, 7)).astype(np.int32)
        with torch.no_grad():
            line = torch.from_numpy(prompt).long()
            for _ in range(16):
                best = model(line).logits[:, -1].argmax(-1, keepdim=True)
                line = torch.cat([line, best], 1)
    loaded = dspark.load(tmp_path, None)
    run = quick_jit(
        lambda params: dspark.generate_tokens(
            loaded.spec, params, jnp.asarray(prompt), jnp.asarray([7], jnp.int32),
            max_new_tokens=16, sampling=dspark.SamplingParams(stop_ids=()),
        )
    )  # fmt: skip
    assert run(loaded.params).tokens[0].tolist() == line[0, 7:].tolist()
