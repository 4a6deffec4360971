"""Training text in a folder, written by the target: shard by shard, resumable.

part-00000.npz ...   see `sequences`
data.json            what the text is, to refuse going on with another one
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.files import replace_text
from dspark_jax.generate import Prompt
from dspark_jax.model import Model
from dspark_jax.training.data_plan import DataConfig, Plan
from dspark_jax.training.rollout import Written, roll_out
from dspark_jax.training.sequences import (
    ANSWER,
    FORCED,
    PADDING,
    QUESTION,
    SHARD,
    Sequences,
    read_sequences,
    shard_path,
    write_sequences,
)

logger = logging.getLogger(__name__)

SETTINGS = "data.json"
FORMAT, VERSION = "dspark-jax-data", 1


@dataclasses.dataclass(frozen=True)
class DataReport:
    """What a folder holds, and how fast this call wrote.

    Attributes:
      sequences: in the folder.
      answer: tokens by role, in the folder.
      question: likewise.
      forced: likewise.
      padding: positions behind the ends of sequences.
      left_out: prompts that were too long.
      new: tokens that the model wrote in this call, questions included.
      seconds: that it took, compiling not counted.
      compile_seconds: likewise for compiling.
    """

    sequences: int
    answer: int
    question: int
    forced: int
    padding: int
    left_out: int
    new: int
    seconds: float
    compile_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Written tokens a second; None if nothing was left to write."""
        return self.new / self.seconds if self.new else None

    @property
    def padding_share(self) -> float:
        """Share of all positions."""
        total = self.answer + self.question + self.forced + self.padding
        return self.padding / total


def generate_data(
    model: Model,
    prompts: Sequence[Prompt],
    folder: str | Path,
    config: DataConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> DataReport:
    """Lets the target answer prompts, and writes what it says to a folder.

    The target decodes plainly; a model loaded without a draft is fastest. Called again
    with the same arguments, it goes on after the last shard that is there; the text is
    the same to the bit as if it had not been interrupted. More sequences may be
    asked for later.

    Args:
      model: from `load`.
      prompts: strings or conversations, taken in turn as often as needed.
      folder: made if needed.
      config: see `DataConfig`.
      progress: told after every round (positions known, positions in all).

    Raises:
      ValueError: bad arguments, or the folder holds text of other settings.
    """
    folder = Path(folder)
    plan = Plan(model, prompts, config)
    folder.mkdir(parents=True, exist_ok=True)
    _settle(folder, _facts(model, prompts, config))
    compiled, began = model.programs.seconds, time.perf_counter()
    new = 0
    for number, first in enumerate(range(0, config.sequences, config.shard)):
        count = min(config.shard, config.sequences - first)
        path = shard_path(folder, number)
        if path.exists() and len(read_sequences(path)) == count:
            continue
        spent = time.perf_counter(), model.programs.seconds
        tick = _positions(progress, first, config)
        text = _shard(model, plan, config, range(first, first + count), tick)
        write_sequences(path, text)
        wrote = int(text.written.sum())
        new += wrote
        compiling = model.programs.seconds - spent[1]
        logger.info(
            "%s: %d of %d sequences, %.0f tokens/s, %.1f %% padding",
            path.name, first + count, config.sequences,
            wrote / (time.perf_counter() - spent[0] - compiling),
            100 * float((text.role == PADDING).mean()),
        )  # fmt: skip
    compiling = model.programs.seconds - compiled
    spent = time.perf_counter() - began - compiling
    role = read_sequences(folder).role
    return DataReport(
        sequences=len(role),
        answer=int((role == ANSWER).sum()),
        question=int((role == QUESTION).sum()),
        forced=int((role == FORCED).sum()),
        padding=int((role == PADDING).sum()),
        left_out=plan.left_out,
        new=new,
        seconds=spent,
        compile_seconds=compiling,
    )


def _positions(
    progress: Callable[[int, int], None] | None, first: int, config: DataConfig
) -> Callable[[int], None] | None:
    """Turns what a shard tells into what the caller wants to know."""
    if progress is None:
        return None
    before, total = first * config.length, config.sequences * config.length
    return lambda done: progress(before + done, total)


def _shard(
    model: Model,
    plan: Plan,
    config: DataConfig,
    indices: range,
    tick: Callable[[int], None] | None,
) -> Sequences:
    """Sequences of these indices; a function of the settings only.

    Every shard begins with empty caches and its own order of rows, so that a run that
    was interrupted computes what it would have computed.
    """
    jobs = [plan.job(index) for index in indices]
    tokens = np.zeros((len(jobs), config.length), np.int32)
    role = np.full((len(jobs), config.length), PADDING, np.uint8)
    one: Written
    for row, one in roll_out(
        model,
        jobs,
        batch=config.batch,
        length=config.length,
        variant=config.variant,
        turns=plan.turns,
        answers=config.most_answers,
        tick=tick,
    ):
        tokens[row, : len(one.tokens)] = one.tokens
        role[row, : len(one.roles)] = one.roles
    return Sequences(
        tokens,
        role,
        np.asarray([job.temperature for job in jobs], np.float32),
        np.asarray([job.prompt for job in jobs], np.int32),
    )


def _facts(
    model: Model, prompts: Sequence[Prompt], config: DataConfig
) -> dict[str, Any]:
    """What the text depends on, JSON-ready."""
    info = model.info()
    target = {
        name: info[name]
        for name in ("name", "architecture", "layers", "hidden_size", "vocab_size",
                     "dtype")
    }  # fmt: skip
    given = hashlib.sha256()
    for prompt in prompts:
        given.update(json.dumps(prompt, sort_keys=True).encode() + b"\n")
    facts = {
        "format": FORMAT,
        "version": VERSION,
        **{f"model {name}": value for name, value in target.items()},
        "prompts": given.hexdigest(),
        **config.to_json(),
    }
    return json.loads(json.dumps(facts))


def _settle(folder: Path, facts: dict[str, Any]) -> None:
    """Writes the settings, or compares them with those of the folder.

    Raises:
      ValueError: the folder holds text of other settings, or more of it.
    """
    path = folder / SETTINGS
    shards = [file for file in folder.iterdir() if SHARD.fullmatch(file.name)]
    if shards and not path.exists():
        raise ValueError(
            f"{folder} holds {shards[0].name} but no {SETTINGS}; give another folder"
        )
    if path.exists() and shards:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        other = [
            f"{name} {found.get(name)!r}, now {facts.get(name)!r}"
            for name in facts | found
            if name != "sequences" and found.get(name) != facts.get(name)
        ]
        if other:
            raise ValueError(
                f"{folder} holds text of other settings: {'; '.join(other)}. Give the "
                "same ones, or another folder"
            )
        if found["sequences"] > facts["sequences"]:
            raise ValueError(
                f"`sequences` is {facts['sequences']}; {folder} is for "
                f"{found['sequences']} already: give as many, or another folder"
            )
    replace_text(path, json.dumps(facts, indent=2) + "\n")
