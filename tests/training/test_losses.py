"""Training forward, losses and gradients against the reference data."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dspark_jax.config import AttentionConfig, DecoderConfig, RopeConfig
from dspark_jax.config_draft import DraftConfig
from dspark_jax.models import params as trees
from dspark_jax.models.draft import backbone
from dspark_jax.training import losses
from dspark_jax.training.anchors import block_labels, sample_anchors
from dspark_jax.training.forward import teacher_forced

DATA = Path(__file__).parents[1] / "data"
HEADS = ("vanilla", "gated", "rnn", "dflash")
NAMES = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn": None,
    "mlp": None,
    "embed_tokens": "embed",
    "markov_head": "markov",
    "markov_w1": "w1",
    "markov_w2": "w2",
    "gate_proj": "gate_proj",
    "confidence_head": "confidence",
    "proj": None,
}


def path_of(name):
    """Our path and layer index of a reference parameter name."""
    layer, path = None, []
    parts = name.split(".")
    if parts[0] == "layers":
        layer, parts = int(parts[1]), ["layers", "full", *parts[2:]]
    for part in parts:
        ours = NAMES.get(part, part)
        if parts[0] == "markov_head":
            ours = {"gate_proj": "gate", "joint_proj": "joint"}.get(part, ours)
        if ours is not None:
            path.append(ours)
    return tuple(path), layer


def load_tree(file):
    """A reference file as our tree, layers stacked."""
    flat, layers = {}, {}
    for name, value in load_file(file).items():
        path, layer = path_of(name)
        if layer is None:
            flat[path] = value
        else:
            layers.setdefault(path, {})[layer] = value
    for path, by_layer in layers.items():
        flat[path] = np.stack([by_layer[i] for i in sorted(by_layer)])
    return trees.unflatten({path: jnp.asarray(x) for path, x in flat.items()})


def draft_config(folder, head):
    """The draft's config from the reference's JSON."""
    c = json.loads((folder / "config.json").read_text())
    decoder = DecoderConfig(
        architecture="qwen3",
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_heads=c["num_attention_heads"],
        layer_types=("full",) * c["num_hidden_layers"],
        full=AttentionConfig(
            c["num_key_value_heads"],
            c["head_dim"],
            RopeConfig(theta=c["rope_parameters"]["rope_theta"]),
        ),
        rms_norm_eps=c["rms_norm_eps"],
    )
    return DraftConfig(
        backbone=decoder,
        block_size=c["block_size"],
        target_layer_ids=tuple(c["target_layer_ids"]),
        num_target_layers=c["num_target_layers"],
        mask_token_id=c["mask_token_id"],
        markov_rank=c.get("markov_rank", 0),
        markov_head="none" if head == "dflash" else head,
        confidence=c["enable_confidence_head"],
        confidence_with_markov=c.get("confidence_head_with_markov", False),
        own_embed=True,
        own_head=True,
    )


class Case:
    """One head's data, config and loss function."""

    def __init__(self, head):
        folder = DATA / "qwen3_rand" / f"draft_{head}"
        self.gold = dict(np.load(DATA / "loss" / f"loss_{head}.npz"))
        self.config = draft_config(folder, head)
        self.params = load_tree(folder / "model.safetensors")
        self.grads = trees.flatten(
            load_tree(DATA / "loss" / f"grads_{head}.safetensors")
        )
        ce, l1, confidence, decay = (float(a) for a in self.gold["alphas"])
        self.loss_config = losses.LossConfig(
            ce, l1, confidence, decay, detach_confidence=False
        )

    def forward(self, params, loss_config):
        """(loss, (outputs, terms, parts, labels, supervised))."""
        g, config = self.gold, self.config
        tokens = jnp.asarray(g["input_ids"])
        anchors = jnp.asarray(g["anchor_positions"])
        labels, supervised = block_labels(
            tokens,
            jnp.asarray(g["loss_mask"]) > 0,
            anchors,
            jnp.asarray(g["block_keep_mask"]),
            config.gamma,
        )
        outputs = teacher_forced(
            config,
            params,
            {},
            tokens,
            jnp.asarray(g["target_features"]),
            anchors,
            labels,
            loss_config.detach_confidence,
        )
        steps = np.arange(config.gamma)[None, None]
        at = np.minimum(g["anchor_positions"][:, :, None] + steps, 25)
        hidden = g["target_last_hidden"][np.arange(3)[:, None, None], at]
        flat = jnp.asarray(hidden.reshape(-1, hidden.shape[-1]))
        logits = backbone.base_logits(config, params, {}, flat)
        target = jax.nn.softmax(jax.lax.stop_gradient(logits), axis=-1)
        terms = losses.dense_terms(
            outputs.logits, target.reshape(outputs.logits.shape), labels
        )
        loss, parts = losses.total(terms, outputs.confidence, supervised, loss_config)
        return loss, (outputs, terms, parts, labels, supervised)


@pytest.fixture(scope="module", params=HEADS)
def case(request):
    """One head."""
    return Case(request.param)


def close(have, want, tolerance):
    """Largest difference relative to the largest reference value."""
    have, want = np.asarray(have), np.asarray(want)
    assert np.abs(have - want).max() <= tolerance * np.abs(want).max()


def test_labels_and_supervision(case):
    _, (_, _, _, labels, supervised) = case.forward(case.params, case.loss_config)
    mask = case.gold["eval_mask"]
    np.testing.assert_array_equal(supervised, mask)
    wanted = case.gold["target_ids"]
    np.testing.assert_array_equal(np.asarray(labels)[mask], wanted[mask])


def test_predictions(case):
    _, (outputs, terms, _, _, _) = case.forward(case.params, case.loss_config)
    keep = case.gold["block_keep_mask"]
    close(outputs.logits[keep], case.gold["draft_logits"][keep], 1e-5)
    if case.config.confidence:
        close(outputs.confidence[keep], case.gold["confidence_logits"][keep], 1e-5)
    mask = case.gold["eval_mask"]
    close(terms.accept[mask], case.gold["accept_rate"][mask], 1e-5)


def test_loss_terms(case):
    loss, (_, _, parts, _, _) = case.forward(case.params, case.loss_config)
    for name in ("ce", "l1", "confidence"):
        if name in parts and case.gold[f"{name}_loss_den"] > 0:
            ratio = case.gold[f"{name}_loss_num"] / (
                case.gold[f"{name}_loss_den"] + losses.EPSILON
            )
            close(parts[name], ratio, 1e-5)
    close(loss, case.gold["loss"], 1e-5)


@pytest.mark.slow
def test_gradients(case):
    grads = jax.grad(lambda p: case.forward(p, case.loss_config)[0])(case.params)
    grads = trees.flatten(grads)
    trained = set(grads) - {("embed", "weight"), ("lm_head", "weight")}
    assert trained == set(case.grads)
    for path, want in case.grads.items():
        close(grads[path], want, 1e-5)


@pytest.mark.parametrize("detach", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_fr26_confidence_loss_alone_moves_nothing_else(detach):
    case = Case("vanilla")
    only = losses.LossConfig(0.0, 0.0, 1.0, 4.0, detach_confidence=detach)
    grads = trees.flatten(jax.grad(lambda p: case.forward(p, only)[0])(case.params))
    moved = {path for path, g in grads.items() if np.abs(np.asarray(g)).max() > 0}
    confidence = {path for path in grads if path[0] == "confidence"}
    assert (moved == confidence) == detach
    assert confidence <= moved


def test_sparse_terms_equal_dense_terms():
    random = np.random.default_rng(0)
    logits = jnp.asarray(random.normal(size=(4, 5, 50)), jnp.float32)
    ids = np.stack([random.permutation(50)[:8] for _ in range(20)]).reshape(4, 5, 8)
    probs = random.dirichlet(np.ones(9), size=(4, 5))[..., :8].astype(np.float32)
    ids[..., 3] = -1  # its mass is missing
    dense = np.zeros((4, 5, 50), np.float32)
    for row in np.ndindex(4, 5):
        for i, p in zip(ids[row], probs[row], strict=True):
            if i >= 0:
                dense[row][i] += p
    labels = jnp.asarray(random.integers(-1, 50, size=(4, 5)), jnp.int32)
    want = losses.dense_terms(logits, jnp.asarray(dense), labels)
    sparse_ids = jnp.asarray(ids, jnp.int32)
    have = losses.sparse_terms(logits, sparse_ids, jnp.asarray(probs), labels)
    for name in ("ce", "l1", "accept"):
        np.testing.assert_allclose(
            getattr(have, name), getattr(want, name), rtol=2e-6, atol=2e-6
        )
    # The half of a total variation is not in the L1.
    overlap = np.minimum(dense, np.asarray(jax.nn.softmax(logits))).sum(-1)
    np.testing.assert_allclose(have.accept, overlap, atol=2e-6)
    soft = losses.sparse_terms(logits, sparse_ids, jnp.asarray(probs))
    log_q = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(soft.ce, -(dense * log_q).sum(-1), rtol=2e-6)


def test_anchors_are_supervised_pairs():
    random = np.random.default_rng(1)
    mask = random.random((6, 40)) < 0.6
    mask[5] = False
    positions, keep = sample_anchors(random, mask, 9)
    assert positions.shape == keep.shape == (6, 9)
    assert not keep[5].any()
    for row in range(5):
        chosen = positions[row][keep[row]]
        assert (np.diff(chosen) > 0).all()
        assert mask[row][chosen].all() and mask[row][chosen + 1].all()
        candidates = (mask[row, :-1] & mask[row, 1:]).sum()
        assert len(chosen) == min(9, candidates)


def test_expected_length_stops_at_the_first_unsupervised_row():
    accept = jnp.asarray([[0.5, 0.5, 1.0], [1.0, 1.0, 1.0]], jnp.float32)
    supervised = jnp.asarray([[True, True, False], [True, True, True]])
    have = losses.expected_length(accept, supervised)
    np.testing.assert_allclose(have, [1.75, 4.0])
