"""Models whose laws are written down: the next token depends on the last one.

Both run through the ordinary modules. The target's only layer adds nothing, so
its logits are a table look-up of the input token; the draft's backbone gives
nothing and its Markov head is the whole table.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from dspark_jax.config import AttentionConfig, DecoderConfig
from dspark_jax.config_draft import DraftConfig
from dspark_jax.model import Model, make_model
from dspark_jax.models import dense
from dspark_jax.models.draft import backbone
from dspark_jax.models.params import flatten, for_cpu, unflatten
from dspark_jax.spec import Spec
from dspark_jax.text import Tokenizer

# Logits of ids that a table excludes; exp of it is 0 in float32.
NEVER = -1e4


def scripted_model(
    target_logits: np.ndarray,
    draft_logits: np.ndarray,
    *,
    gamma: int = 3,
    confidence: np.ndarray | None = None,
    max_position: int = 512,
    eos_ids: tuple[int, ...] = (),
    tokenizer: Tokenizer | None = None,
) -> Model:
    """A target and a draft from tables of logits.

    Args:
      target_logits: float[V, V]. Row x holds the logits after token x; -inf
        becomes -1e4.
      draft_logits: float[V, V], likewise.
      gamma: drafted tokens a round.
      confidence: float[V]. Confidence logit of a draft after token x, so that the
        second draft's depends on the first; None has no confidence head.
      max_position: positions of the target.
      eos_ids: default stop ids.
      tokenizer: for `generate`.
    """
    target_table = np.maximum(np.asarray(target_logits, np.float32), NEVER)
    draft_table = np.maximum(np.asarray(draft_logits, np.float32), NEVER)
    vocab = target_table.shape[0]
    geometry = AttentionConfig(num_kv_heads=1, head_dim=2)
    target = DecoderConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=vocab,
        intermediate_size=2,
        num_heads=1,
        layer_types=("full",),
        full=geometry,
        rms_norm_eps=1e-30,
        max_position=max_position,
        eos_ids=eos_ids,
    )
    draft = DraftConfig(
        backbone=target,
        block_size=gamma,
        target_layer_ids=(-1,),
        num_target_layers=1,
        mask_token_id=0,
        markov_rank=vocab,
        markov_head="vanilla",
        confidence=confidence is not None,
        confidence_with_markov=confidence is not None,
        own_head=True,
    )
    one_hot = np.eye(vocab, dtype=np.float32)
    target_params = _silent(dense.abstract_params(target))
    target_params["embed"]["weight"] = jnp.asarray(one_hot)
    # A normed one-hot has length sqrt(V).
    scaled = target_table.T / math.sqrt(vocab)
    target_params["lm_head"]["weight"] = jnp.asarray(scaled)
    draft_params = _silent(backbone.abstract_draft_params(draft))
    draft_params["markov"]["w1"]["weight"] = jnp.asarray(one_hot)
    draft_params["markov"]["w2"]["weight"] = jnp.asarray(draft_table.T.copy())
    if confidence is not None:
        weight = np.zeros((1, 2 * vocab), np.float32)
        weight[0, vocab:] = confidence
        bias = np.zeros((1,), np.float32)
        draft_params["confidence"] = {
            "weight": jnp.asarray(weight),
            "bias": jnp.asarray(bias),
        }
    params = {
        "target": for_cpu(target_params),
        "draft": for_cpu(draft_params),
    }
    return make_model(Spec(target, draft), params, tokenizer, "scripted")


def _silent(shapes: dict) -> dict:
    """Zero matrices and unit gains."""
    leaves = {}
    for path, leaf in flatten(shapes).items():
        make = jnp.ones if path[-2].endswith("norm") else jnp.zeros
        leaves[path] = make(leaf.shape, leaf.dtype)
    return unflatten(leaves)
