"""Trains the draft of the default model on a CPU, from the target's own text.

    python scripts/train_draft.py annotate --data sequences.npz --run runs/x
    python scripts/train_draft.py train --data sequences.npz --run runs/x \\
        --minutes 75 --out checkpoints/smollm2-135m-dspark

`annotate` stores target features and probabilities; `train` may run beside it and
uses what there is. The schedule follows the clock, so that it always ends; training
resumes from `state.pkl`.
"""

from __future__ import annotations

import argparse
import json
import logging
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from training import annotate, card, data, start, step, store

from dspark_jax.checkpoint.load import read_params
from dspark_jax.checkpoint.native import read_native
from dspark_jax.config import AttentionConfig, DecoderConfig, DraftConfig, RopeConfig
from dspark_jax.models.params import Tree, flatten, for_cpu

logger = logging.getLogger("train_draft")

TAPS = (1, 8, 15, 22, 28)
TOP = 32
HELD_OUT = 64
DRAFT_VOCAB = 16384
MASK_ID = 16  # a special token that the model never writes
SEED = 20


def draft_config(target: DecoderConfig, layers: int, rank: int) -> DraftConfig:
    """The draft: Qwen3-style layers with the target's sizes."""
    geometry = target.attention("full")
    return DraftConfig(
        backbone=DecoderConfig(
            architecture="qwen3",
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_heads=target.num_heads,
            layer_types=("full",) * layers,
            full=AttentionConfig(
                geometry.num_kv_heads,
                geometry.head_dim,
                RopeConfig(theta=geometry.rope.theta),
            ),
            rms_norm_eps=target.rms_norm_eps,
            max_position=target.max_position,
            eos_ids=target.eos_ids,
            dtype="bfloat16",
        ),
        block_size=5,
        target_layer_ids=TAPS,
        num_target_layers=target.num_layers,
        mask_token_id=MASK_ID,
        sample_from_anchor=True,
        markov_rank=rank,
        markov_head="vanilla",
        confidence=True,
        confidence_with_markov=True,
        draft_vocab_size=DRAFT_VOCAB,
    )


def read_target(path: str) -> tuple[DecoderConfig, Tree]:
    """The target in bfloat16."""
    kind, config, params = read_params(path, dtype="bfloat16")
    if not isinstance(config, DecoderConfig):
        raise SystemExit(f"{path} is a {kind}; a draft needs a target to train for")
    return config, params


def run_annotate(options: argparse.Namespace) -> None:
    """Annotates what is not annotated yet, held-out sequences first."""
    config, target = read_target(options.target)
    target = for_cpu(target)
    tokens = np.load(options.data)["tokens"]
    count, length = tokens.shape
    width = len(TAPS) * config.hidden_size
    stores = annotate.stores(options.run / "features", count, length, width, TOP)
    trained = count - HELD_OUT
    order = np.random.default_rng(7).permutation(trained)
    order = np.concatenate([np.arange(trained, count), order])[: options.limit]
    order = order[stores["done"][order] == 0]
    begin = time.monotonic()
    for at in range(0, len(order), options.batch):
        rows = order[at : at + options.batch]
        features, ids, logs = jax.device_get(
            annotate.annotate(
                config, target, jnp.asarray(tokens[rows].astype(np.int32)), TAPS, TOP
            )
        )
        stores["features"][rows] = features.view(np.uint16)
        stores["top_ids"][rows], stores["top_logs"][rows] = ids, logs
        stores["done"][rows] = 1
        if at // options.batch % 20 == 0:
            rate = (at + len(rows)) * length / (time.monotonic() - begin)
            logger.info("annotated %d of %d, %.0f tok/s", at, len(order), rate)


def feature_scale(annotated: data.Annotated) -> np.ndarray:
    """Size of each feature, float32[m * H]; the first positions are outliers."""
    rows = annotated.ready[:64]
    features = annotated.stores["features"][rows].view(ml_dtypes.bfloat16)
    features = features[:, 16:].astype(np.float32)
    return np.sqrt(np.mean(np.square(features), axis=(0, 1))) + 1e-3


def begin_state(
    config: DraftConfig,
    target: Tree,
    annotated: data.Annotated,
    role: np.ndarray,
    scale: np.ndarray,
    run: pathlib.Path,
) -> step.State:
    """A fresh state: last target layers, and a Markov head trained on bigrams."""
    params = start.initial_params(config, target, scale, SEED)
    tokens = annotated.tokens[: annotated.trained]
    written = role[: annotated.trained, 1:] > 0
    following = annotated.t2d[tokens[:, 1:][written]]
    pairs = np.stack([tokens[:, :-1][written], following], axis=1)
    path = run / "bigram.npz"
    if not path.exists():
        w1, w2 = start.bigram_head(
            pairs[following >= 0],
            config.backbone.vocab_size,
            config.head_rows,
            config.markov_rank,
            SEED,
        )
        np.savez(path, w1=w1, w2=w2)
    w1, w2 = (np.load(path)[name] for name in ("w1", "w2"))
    params["markov"] = {
        "w1": {"weight": jnp.asarray(w1)},
        "w2": {"weight": jnp.asarray(w2)},
    }
    return step.fresh_state(params)


def schedule(progress: float, peak: float) -> tuple[float, float]:
    """(learning rate, CE weight) at a share of the time.

    Warm-up 3 %, cosine to 5 %. CE falls from 1 to the paper's 0.1 at 60 %: the
    gradient of L1 vanishes where the draft has no mass yet.
    """
    warm = min(1.0, progress / 0.03)
    rate = peak * warm * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * min(progress, 1.0))))
    return float(rate), float(max(0.1, 1.0 - 0.9 * progress / 0.6))


def run_train(options: argparse.Namespace) -> None:
    """Trains until the time is over, exporting on the way."""
    loaded = np.load(options.data)
    tokens, role, heat = loaded["tokens"], loaded["role"], loaded["temperature"]
    target_config, target = read_target(options.target)
    config = draft_config(target_config, options.layers, options.rank)
    vocab = target_config.vocab_size
    d2t = data.draft_vocabulary(
        tokens[:-HELD_OUT], role[:-HELD_OUT], vocab, DRAFT_VOCAB, range(17)
    )
    annotated = data.Annotated(
        options.run / "features", tokens, role, d2t, vocab, HELD_OUT
    )
    path = options.run / "state.pkl"
    random = np.random.default_rng(SEED)
    elapsed, anchors_seen, history = 0.0, 0, []
    if path.exists():
        saved = store.load_state(path)
        state, scale = jax.tree.map(jnp.asarray, saved["state"]), saved["scale"]
        elapsed, anchors_seen = saved["elapsed"], saved["anchors"]
        history, annotated.visits = saved["history"], saved["visits"]
        random.bit_generator.state = saved["random"]
    else:
        scale = feature_scale(annotated)
        state = begin_state(config, target, annotated, role, scale, options.run)
    table = target["embed"]["weight"]
    frozen = {
        "embed": {"weight": table},
        "lm_head": {
            "weight": jnp.take(
                target.get("lm_head", target["embed"])["weight"],
                jnp.asarray(d2t),
                axis=0,
            )
        },
        "d2t": jnp.asarray(d2t),
        "scale": jnp.asarray(scale),
    }
    del target

    def save() -> None:
        content = {
            "state": state,
            "scale": scale,
            "elapsed": elapsed,
            "random": random.bit_generator.state,
            "visits": annotated.visits,
            "anchors": anchors_seen,
            "history": history,
        }
        store.save_state(path, content)

    def measure(count: int) -> dict[str, Any]:
        got = step.held_out_figures(
            config, state.average, frozen, annotated, heat, count
        )
        got |= {
            "minutes": elapsed / 60,
            "step": int(state.step),
            "anchors_seen": anchors_seen,
            "sequences": len(annotated.ready),
        }
        logger.info("held out %s", json.dumps(got))
        history.append(got)
        return got

    budget = options.minutes * 60
    marks = {"log": 0.0, "save": elapsed, "measure": elapsed, "export": elapsed}
    every = {"save": 300.0, "measure": 480.0, "export": 900.0}
    mean: dict[str, float] = {}
    last = time.monotonic()
    exported = False
    while elapsed < budget:
        batch = annotated.draw(random, options.sequences, options.anchors)
        rate, ce = schedule(elapsed / budget, options.rate)
        state, parts = step.train_step(
            config, state, frozen, batch, jnp.float32(rate), jnp.float32(ce)
        )
        for name, value in jax.device_get(parts).items():
            mean[name] = 0.98 * mean.get(name, float(value)) + 0.02 * float(value)
        anchors_seen += int(batch["keep"].sum())
        now = time.monotonic()
        elapsed, last = elapsed + now - last, now
        if elapsed - marks["log"] > 20:
            marks["log"] = elapsed
            annotated.refresh()
            shown = " ".join(f"{k} {v:.3f}" for k, v in sorted(mean.items()))
            logger.info(
                "%.1f min step %d anchors %d seqs %d lr %.2e cew %.2f %s",
                elapsed / 60,
                int(state.step),
                anchors_seen,
                len(annotated.ready),
                rate,
                ce,
                shown,
            )
        first = not exported and elapsed > options.first_export * 60
        if first or elapsed - marks["export"] > every["export"]:
            exported, marks["export"], marks["measure"] = True, elapsed, elapsed
            text = json.dumps(measure(24), indent=2)
            store.export(options.out, config, state.average, frozen, text)
            logger.info("exported to %s", options.out)
        if elapsed - marks["measure"] > every["measure"]:
            marks["measure"] = elapsed
            measure(24)
        if elapsed - marks["save"] > every["save"]:
            marks["save"] = elapsed
            save()
    save()
    figures = measure(HELD_OUT)
    (options.run / "figures.json").write_text(json.dumps(history, indent=2))
    store.export(
        options.out, config, state.average, frozen, json.dumps(figures, indent=2)
    )
    logger.info("done")


def run_card(options: argparse.Namespace) -> None:
    """Writes the model card of the exported draft."""
    loaded = np.load(options.data)
    tokens, role = loaded["tokens"], loaded["role"]
    config, params = read_native(options.out)
    history = json.loads((options.run / "figures.json").read_text())
    held, written = tokens[-HELD_OUT:], role[-HELD_OUT:] > 0
    known = np.isin(held[written], np.asarray(params["d2t"]))
    done = np.load(options.run / "features" / "done.npy")[:-HELD_OUT] == 1
    answers = int((role[:-HELD_OUT][done] == data.ANSWER).sum())
    leaves = flatten(params)
    facts = {
        "layers": config.backbone.num_layers,
        "block": config.block_size,
        "rank": config.markov_rank,
        "taps": ", ".join(map(str, config.target_layer_ids)),
        "mask": config.mask_token_id,
        "rows": config.draft_vocab_size,
        "coverage": float(known.mean()),
        "parameters": sum(x.size for x in leaves.values()) / 1e6,
        "megabytes": sum(x.nbytes for x in leaves.values()) / 1e6,
        "answers": answers,
        "passes": history[-1]["anchors_seen"] / answers,
        "share": options.share,
        "rate": options.rate,
        "seed": SEED,
        "held": HELD_OUT,
        "notes": options.notes,
    }
    (options.out / "README.md").write_text(card.write_card(facts, history))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["annotate", "train", "card"])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--run", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=75.0)
    parser.add_argument("--first-export", type=float, default=8.0, help="minutes")
    parser.add_argument("--batch", type=int, default=8, help="annotate")
    parser.add_argument("--limit", type=int, default=None, help="annotate")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--anchors", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--share", type=float, default=1.0, help="card: of the cores")
    parser.add_argument("--notes", default="", help="card: a sentence to add")
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", force=True
    )
    logging.getLogger("jax").setLevel(logging.WARNING)
    tasks = {"annotate": run_annotate, "train": run_train, "card": run_card}
    tasks[options.task](options)


if __name__ == "__main__":
    main()
