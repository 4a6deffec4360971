"""From names and files to a training run, and from a run to a draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from dspark_jax.checkpoint import known
from dspark_jax.checkpoint.draft import read_draft
from dspark_jax.checkpoint.load import read_config, read_params
from dspark_jax.config import DecoderConfig
from dspark_jax.errors import CheckpointError
from dspark_jax.evaluation.machine import hardware, versions
from dspark_jax.files import replace_text
from dspark_jax.spec import Spec, placement
from dspark_jax.training.card import model_card
from dspark_jax.training.export import export_draft
from dspark_jax.training.run_files import RunFiles
from dspark_jax.training.sequences import Sequences, join, read_sequences
from dspark_jax.training.settings import TrainConfig, read_recipe
from dspark_jax.training.trainer import EVERY, Cadence, Trainer


def train(
    target: str | Path,
    data: str | Path | Sequence[str | Path],
    run: str | Path,
    out: str | Path | None = None,
    *,
    config: TrainConfig | None = None,
    minutes: float | None = None,
    held_out: int = 64,
    base: str | Path | None = None,
    features: str | Path | None = None,
    cache_bytes: int | None = None,
    cadence: Cadence = EVERY,
    devices: tuple[int, int] = (1, 1),
) -> Trainer:
    """Trains a draft for a target, or goes on with a run.

    Args:
      target: as for `load`.
      data: text that the target wrote: a file or folder for `read_sequences`, or
        several, which are put one behind the other.
      run: folder of the run; it holds all that is needed to go on.
      out: where the draft goes once the last step is done.
      config: settings; None: the paper's.
      minutes: of this sitting.
      held_out: sequences at the end of the text that are only measured on.
      base: a draft whose training goes on, with its shape and vocabulary; as for
        `load`.
      features: folder of target features, which runs may share; None: inside `run`.
      cache_bytes: its size at most; None: no limit, 0: nothing is kept.
      cadence: how often to log, measure and save.
      devices: how many to split a batch and the weights over.

    Returns:
      The trainer, with the state reached.

    Raises:
      ValueError: settings, text or run that do not fit.
      CheckpointError: a target that cannot be read.
    """
    paths = [data] if isinstance(data, str | Path) else list(data)
    trainer = make_trainer(
        target,
        paths,
        run,
        config or TrainConfig(),
        held_out=held_out,
        base=base,
        features=features,
        cache_bytes=cache_bytes,
        devices=devices,
    )
    complete = trainer.train(minutes=minutes, cadence=cadence)
    if complete and out is not None:
        export_run(trainer, out, trainer.measure()["held_out"], str(target))
    return trainer


def settings_for(recipe: str | Path | None, steps: int | None) -> TrainConfig:
    """Settings of a recipe, or the paper's, with other steps if they are given."""
    config = TrainConfig() if recipe is None else read_recipe(recipe)
    return config if steps is None else dataclasses.replace(config, steps=steps)


def make_trainer(
    target: str | Path,
    data: Sequence[str | Path],
    run: str | Path,
    config: TrainConfig,
    *,
    held_out: int,
    features: str | Path | None,
    cache_bytes: int | None,
    base: str | Path | None = None,
    devices: tuple[int, int] = (1, 1),
    cache_dir: str | Path | None = None,
) -> Trainer:
    """A trainer from names; arguments as for `train`."""
    text = _read_text(data)
    path = known.resolve(target, cache_dir=cache_dir)
    kind, found = read_config(path)
    if kind != "target" or not isinstance(found, DecoderConfig):
        raise CheckpointError(f"{path} is a {kind}; `target` needs a target model")
    mesh = _mesh(devices)
    place = placement(Spec(found, mesh=mesh), "target") if mesh else None
    _, _, params = read_params(path, sharding_for=place)
    start = None
    if base is not None:
        start = read_draft(known.resolve(base, cache_dir=cache_dir), tables="target")
    return Trainer(
        found,
        params,
        text,
        config,
        run,
        held_out=held_out,
        features=features,
        cache_bytes=cache_bytes,
        base=start,
        mesh=mesh,
    )


def export_run(
    trainer: Trainer,
    out: str | Path,
    figures: dict[str, Any],
    target: str,
    *,
    int8: bool = False,
    usual_length: int | None = None,
) -> None:
    """Writes the draft of a run, and a model card beside it.

    Args:
      trainer: the run.
      out: folder of the draft.
      figures: of `Trainer.measure`.
      target: name of the target, for the card.
      int8: store matrices as 8-bit integers, in half the room.
      usual_length: drafts a round where nothing else is asked for; None is gamma.
    """
    out = Path(out)
    draft = dataclasses.replace(trainer.draft, usual_length=usual_length)
    export_draft(out, draft, trainer.state.exported, trainer.frozen, int8=int8)
    facts = {
        "target": target,
        "machine": hardware(),
        "versions": versions(),
        "sequences": len(trainer.corpus.trained),
        "answer_tokens": int(trainer.corpus.mask[trainer.corpus.trained].sum()),
        "coverage": trainer.corpus.coverage(),
        "based": trainer.base is not None,
    }
    facts["bytes"] = (out / "model.safetensors").stat().st_size
    facts["stored"] = "8-bit integers, a scale a row" if int8 else trainer.target.dtype
    lines = list(trainer.files.metrics())
    card = model_card(draft, trainer.config, facts, figures, lines)
    replace_text(out / "README.md", card)


def curves(run: str | Path, path: str | Path) -> None:
    """Draws the learning curves of a run; needs the `plot` extra."""
    from dspark_jax.training.curves import draw

    draw(list(RunFiles(run).metrics()), path)


def _read_text(data: Sequence[str | Path]) -> Sequences:
    if not data:
        raise ValueError("`data` is empty; give text that the target wrote")
    return join([read_sequences(path) for path in data])


def _mesh(devices: tuple[int, int]) -> Mesh | None:
    if devices == (1, 1):
        return None
    have = jax.devices()
    if devices[0] < 1 or devices[1] < 1 or devices[0] * devices[1] > len(have):
        raise ValueError(
            f"`devices` is {devices}; allowed: a product of at most {len(have)}"
        )
    grid = np.array(have[: devices[0] * devices[1]]).reshape(devices)
    return Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
