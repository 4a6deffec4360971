"""A training run: set up, step, measure, save, resume."""

from __future__ import annotations

import dataclasses
import logging
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dspark_jax.checkpoint import store
from dspark_jax.config import DecoderConfig, require
from dspark_jax.config_draft import DraftConfig
from dspark_jax.models import dense
from dspark_jax.models.draft import backbone
from dspark_jax.models.params import (
    Tree,
    flatten,
    partition,
    shardings,
    unflatten,
)
from dspark_jax.training import bigram, start, target_pass
from dspark_jax.training.batches import draft_vocabulary
from dspark_jax.training.corpus import Corpus
from dspark_jax.training.features import FeatureStore
from dspark_jax.training.held_out import HeldOut, held_out_figures
from dspark_jax.training.optimiser import (
    TrainState,
    ce_weight,
    fresh_state,
    learning_rate,
)
from dspark_jax.training.run_files import RunFiles
from dspark_jax.training.sequences import Sequences
from dspark_jax.training.settings import TrainConfig, draft_config
from dspark_jax.training.step import can_fuse, train_step

logger = logging.getLogger(__name__)

# Sequences that the size of features is measured on, and positions left out of it:
# the first ones are outliers.
MEASURED, OUTLIERS = 64, 16


@dataclasses.dataclass(frozen=True)
class Cadence:
    """What happens every so many steps; 0 is never."""

    log: int = 20
    measure: int = 1000
    save: int = 500
    # Held-out sequences of a measurement on the way.
    measured: int = 24


EVERY = Cadence()


class Trainer:
    """One run in one folder.

    Attributes:
      draft: the draft's config.
      config: the run's settings.
      state: weights, average, moments, steps.
      frozen: tables and factors that are not trained.
      corpus: text and supervision.
      base: weights of the draft whose training goes on, or None.
    """

    def __init__(
        self,
        target: DecoderConfig,
        target_params: Tree,
        text: Sequences,
        config: TrainConfig,
        run: str | Path,
        *,
        held_out: int = 64,
        features: str | Path | None = None,
        cache_bytes: int | None = None,
        base: tuple[DraftConfig, Tree] | None = None,
        mesh: Mesh | None = None,
    ):
        """Sets a run up, or goes on with the one in the folder.

        Args:
          target: the target.
          target_params: its parameters, stacked or listed, not cut in panels.
          text: written by the target.
          config: settings; those of a run that goes on, `steps` aside.
          run: folder of the run.
          held_out: sequences at the end of the text that are only measured on.
          features: folder of what the target says about the text, which runs may
            share; None: inside the run's.
          cache_bytes: its size at most; 0 computes everything anew each time, None
            has no limit.
          base: a draft whose training goes on: its shape, vocabulary and weights stand
            in for `config.draft`, `config.start` and `config.bigram_steps`. It is
            given again when the run goes on.
          mesh: devices with axes "data" and "tensor": sequences of a batch are split
            over the first, weights as declared over the second.

        Raises:
          ValueError: settings that do not fit the target, the text, the mesh or the
            run in the folder.
        """
        self.target, self.config, self.mesh = target, config, mesh
        self.draft: DraftConfig = (
            draft_config(target, config.draft)
            if base is None
            else start.base_config(target, base[0])
        )
        self.base = None if base is None else base[1]
        self.files = RunFiles(run)
        if mesh is not None:
            size = mesh.shape.get("data", 1)
            require(
                config.sequences % size == 0,
                "sequences",
                config.sequences,
                f"a multiple of {size}, the mesh's data axis",
            )
        taps = self.draft.target_layer_ids
        facts = {
            "target": _fingerprint(target_params),
            "text": int(zlib.crc32(np.ascontiguousarray(text.tokens).tobytes())),
            "held_out": held_out,
            "base": None if base is None else _fingerprint(base[1]),
        }
        self.files.check(config, facts)
        cache = None
        if cache_bytes is None or cache_bytes > 0:
            cache = FeatureStore(
                features or self.files.features,
                {"target": facts["target"], "taps": list(taps), "top": config.top},
                text.tokens,
                target_pass.fields(target, taps, config.top),
                cache_bytes,
            )
        self.corpus = Corpus(
            text,
            target,
            target_params,
            taps,
            config.top,
            cache,
            held_out,
            config.sequences,
        )
        self._fused = (
            can_fuse(self.draft, config)
            and mesh is None
            and jax.default_backend() == "cpu"
        )
        self.frozen = self._tables(target_params)
        self.state = self._begin(target_params)

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.state.step)

    def train(
        self,
        *,
        minutes: float | None = None,
        most: int | None = None,
        cadence: Cadence = EVERY,
        report: Callable[[dict[str, Any]], None] = lambda line: None,
    ) -> bool:
        """Steps until the run is over or the time is.

        Args:
          minutes: of this sitting; None: until the last step.
          most: steps of this sitting.
          cadence: see there.
          report: called with every line of metrics.

        Returns:
          Whether the run is complete. The state is saved either way.
        """
        began = last = time.monotonic()
        means: dict[str, float] = {}
        done = self.step
        saved, logged = done, done
        last_step = self.config.steps if most is None else done + most
        while done < min(self.config.steps, last_step):
            if minutes is not None and time.monotonic() - began > 60 * minutes:
                break
            parts = self._one_step(done)
            done += 1
            for name, value in parts.items():
                means[name] = 0.98 * means.get(name, value) + 0.02 * value
            if cadence.log and done % cadence.log == 0:
                now = time.monotonic()
                line = {
                    "step": done,
                    "rate": learning_rate(self.config, done - 1),
                    "ce_weight": ce_weight(self.config, done - 1),
                    "seconds_a_step": (now - last) / (done - logged),
                    **means,
                }
                last, logged = now, done
                self.files.append(line)
                report(line)
            if cadence.measure and done % cadence.measure == 0:
                report(self.measure(cadence.measured))
                last, logged = time.monotonic(), done
            if cadence.save and done % cadence.save == 0:
                self.save()
                saved = done
        if saved != done:
            self.save()
        return done >= self.config.steps

    def measure(self, count: int | None = None) -> dict[str, Any]:
        """Held-out figures of the weights that would be exported, as a metrics line."""
        figures: HeldOut = held_out_figures(
            self.draft,
            self.config,
            self.state.exported,
            self.frozen,
            self.corpus,
            count,
        )
        line = {"step": self.step, "held_out": figures.to_json()}
        self.files.append(line)
        return line

    def save(self) -> None:
        """Writes the state; an earlier one is removed after it."""
        leaves = {_name(i): x for i, x in enumerate(jax.tree.leaves(self.state))}
        self.files.save(self.step, lambda path: store.save_arrays(path, leaves))

    def _one_step(self, step: int) -> dict[str, float]:
        config = self.config
        batch = self._placed(
            self.corpus.batch(config.seed, step, config.sequences, config.anchors)
        )
        self.state, parts = train_step(
            self.draft,
            config.for_steps(),
            self._fused,
            self.state,
            self.frozen,
            batch,
            jnp.float32(learning_rate(config, step)),
            jnp.float32(ce_weight(config, step)),
        )
        return {name: float(x) for name, x in jax.device_get(parts).items()}

    def _placed(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        if self.mesh is None:
            return batch
        axis = "data" if "data" in self.mesh.shape else None
        place = NamedSharding(self.mesh, PartitionSpec(axis))
        return jax.device_put(batch, place)

    def _tables(self, target_params: Tree) -> Tree:
        table = target_params["embed"]["weight"]
        head = dense.head_table(target_params)
        frozen: Tree = {"embed": {"weight": table}, "lm_head": {"weight": head}}
        if self.config.top == 0:
            frozen["target_head"] = {"weight": head}
        rows = self.draft.draft_vocab_size
        if rows is not None:
            text, trained = self.corpus.text, self.corpus.trained
            written = text.written[trained]
            d2t = (
                draft_vocabulary(
                    text.tokens[trained][written], rows, self.target.vocab_size
                )
                if self.base is None
                else np.asarray(self.base["d2t"])
            )
            t2d = np.full(self.target.vocab_size, -1, np.int32)
            t2d[d2t] = np.arange(rows, dtype=np.int32)
            self.corpus.t2d = t2d
            frozen["d2t"], frozen["t2d"] = jnp.asarray(d2t), jnp.asarray(t2d)
            frozen["lm_head"] = {"weight": jnp.take(head, frozen["d2t"], axis=0)}
        measured = self.corpus.trained[:MEASURED]
        features = self.corpus.annotated(measured)["features"].astype(np.float32)
        skip = OUTLIERS if features.shape[1] > 2 * OUTLIERS else 0
        squares = np.mean(np.square(features[:, skip:]), axis=(0, 1))
        frozen["scale"] = jnp.asarray(np.sqrt(squares) + 1e-3)
        return frozen if self.mesh is None else self._spread_tables(frozen)

    def _spread_tables(self, frozen: Tree) -> Tree:
        """Embedding and heads by their vocabulary, the rest on every device."""
        assert self.mesh is not None
        flat = {}
        for path, leaf in flatten(frozen).items():
            axes = ("vocab", "embed") if leaf.ndim == 2 else (None,)
            spec = partition(axes, leaf.shape, self.mesh, {})
            flat[path] = jax.device_put(leaf, NamedSharding(self.mesh, spec))
        return unflatten(flat)

    def _begin(self, target_params: Tree) -> TrainState:
        found = self.files.latest()
        if found is None:
            state = fresh_state(self.config, self._start(target_params))
            return jax.tree.map(jax.device_put, state, self._places(state))
        shapes = jax.eval_shape(
            lambda: fresh_state(self.config, start.random_start(self.draft, 0))
        )
        leaves, structure = jax.tree.flatten(shapes)
        places = jax.tree.leaves(self._places(shapes))
        wanted = {
            _name(i): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
            for i, (leaf, place) in enumerate(zip(leaves, places, strict=True))
        }
        loaded = store.load_arrays(found, wanted)
        state = jax.tree.unflatten(structure, [loaded[name] for name in wanted])
        self.files.forget_after(int(state.step))
        logger.info("going on at step %d", int(state.step))
        return state

    def _start(self, target_params: Tree) -> Tree:
        config, draft = self.config, self.draft
        scale = np.asarray(self.frozen["scale"])
        if self.base is not None:
            return start.base_start(self.base, scale)
        if config.start == "target":
            params = start.target_start(
                draft, self.target, target_params, scale, config.seed
            )
        else:
            params = start.random_start(draft, config.seed)
        if config.bigram_steps:
            text, trained = self.corpus.text, self.corpus.trained
            pairs = bigram.bigrams(
                text.tokens[trained], text.written[trained], self.corpus.t2d
            )
            w1, w2 = bigram.bigram_head(
                pairs,
                self.target.vocab_size,
                draft.head_rows,
                draft.markov_rank,
                config.seed,
                config.bigram_steps,
            )
            params["markov"] |= {"w1": {"weight": w1}, "w2": {"weight": w2}}
        return params

    def _places(self, state: TrainState) -> TrainState:
        """Where each array of a state lies: weights as declared, moments alike."""
        if self.mesh is None:
            here = SingleDeviceSharding(jax.devices()[0])
            return jax.tree.map(lambda leaf: here, state)
        shapes, axes = backbone.declaration(self.draft)
        counts = dense.unit_counts(backbone.decoder_of(self.draft))
        places = flatten(shardings(shapes, axes, self.mesh, counts))
        whole = NamedSharding(self.mesh, PartitionSpec())

        def place(path: tuple, leaf: jax.Array) -> NamedSharding:
            keys = tuple(k.key for k in path if isinstance(k, jax.tree_util.DictKey))
            return places.get(keys, whole)

        return jax.tree_util.tree_map_with_path(place, state)


def _name(index: int) -> str:
    return f"leaf{index:04d}"


def _fingerprint(params: Tree) -> int:
    """A checksum of the first values of every leaf."""
    crc = 0
    for path, leaf in flatten(params).items():
        first = np.asarray(leaf[:1]).reshape(-1)[:4096]
        crc = zlib.crc32(".".join(path).encode() + first.tobytes(), crc)
    return crc
