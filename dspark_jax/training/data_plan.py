"""Which sequence begins how: prompts, temperatures and seeds by index."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.config import require
from dspark_jax.decoding.requests import Variant
from dspark_jax.decoding.words import fold_seeds
from dspark_jax.generate import Prompt
from dspark_jax.model import Model
from dspark_jax.settings import SamplingParams
from dspark_jax.text import Tokenizer, render_chat
from dspark_jax.training.rollout import Job
from dspark_jax.training.turns import Turns, invented_turns

logger = logging.getLogger(__name__)

# Shares are counted in these units, so that they add up exactly.
PARTS = 1_000_000
# A prompt leaves at least this share of a sequence to the answer.
ROOM = 1 / 8


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What text is to be written.

    Attributes:
      sequences: N, >= 1.
      length: S, tokens of a sequence, >= 2.
      batch: sequences written at once, >= 1.
      temperatures: (temperature, weight) pairs; sequences take turns.
      seed: of all draws.
      invent: share of the sequences, 0..1, that begin with a question by the model.
      answers: most answers of a sequence; None: one, or with `invent` above 0 any
        number, with invented questions between them, until the sequence is full.
      shard: sequences a file, >= 1.
      chat: whether prompts go through the chat template, or are plain text.

    Raises:
      ValueError: a value out of range, naming the field.
    """

    sequences: int
    length: int = 256
    batch: int = 64
    temperatures: tuple[tuple[float, int], ...] = ((0.0, 3), (0.7, 1), (1.0, 2))
    seed: int = 0
    invent: float = 0.0
    answers: int | None = None
    shard: int = 256
    chat: bool = True

    def __post_init__(self) -> None:
        for name, least in (
            ("sequences", 1), ("length", 2), ("batch", 1), ("shard", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            good = type(value) is int and value >= least
            require(good, name, value, f"an int >= {least}")
        n = self.answers
        require(n is None or (type(n) is int and n >= 1), "answers", n, "None or >= 1")
        share = self.invent
        require(isinstance(share, int | float) and 0 <= share <= 1, "invent", share,
                "0..1")  # fmt: skip
        SamplingParams(seed=self.seed)
        require(self.seed is not None, "seed", self.seed, "an int in 0..2**64-1")
        mix = self.temperatures
        good = bool(mix) and all(type(w) is int and w >= 1 for _, w in mix)
        require(good, "temperatures", mix, "(temperature, weight) pairs, weights >= 1")
        for heat, _ in mix:
            SamplingParams(temperature=heat)
        if self.invent and not self.chat:
            raise ValueError(
                f"`invent` is {self.invent} with chat=False; questions are invented "
                "through the chat template"
            )

    @property
    def most_answers(self) -> int | None:
        """Answers of a sequence; None: until it is full."""
        return 1 if self.answers is None and not self.invent else self.answers

    @property
    def variant(self) -> Variant:
        """The simplest program that draws at all temperatures of the text."""
        params = [SamplingParams(temperature=heat) for heat, _ in self.temperatures]
        several = self.most_answers != 1
        greedy = all(one.greedy for one in params) and not self.invent and not several
        return "greedy" if greedy else "sampled"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


def parse_temperatures(text: str) -> tuple[tuple[float, int], ...]:
    """`"0:3,0.7:1,1:2"` as pairs; a weight that is left out is 1.

    Raises:
      ValueError: another form.
    """
    pairs = []
    for part in text.split(","):
        heat, _, weight = part.partition(":")
        try:
            pairs.append((float(heat), int(weight or 1)))
        except ValueError:
            raise ValueError(
                f"`temperatures` is {text!r}; wanted: temperature:weight pairs such "
                "as '0:3,0.7:1,1:2'"
            ) from None
    return tuple(pairs)


class Plan:
    """The jobs of a run, each a function of its index and the settings.

    Attributes:
      turns: how sequences go on after an answer; None ends them there.
      left_out: prompts that are too long for the sequences.
      used: indices of the others.
    """

    def __init__(self, model: Model, prompts: Sequence[Prompt], config: DataConfig):
        """Encodes the prompts.

        Raises:
          ValueError: no prompt that fits, a model without a tokenizer, a
            sequence longer than the model's positions, or a chat template in
            which questions cannot be invented.
        """
        tokenizer, target = model.tokenizer, model.spec.target
        if tokenizer is None:
            raise ValueError(f"model {model.name!r} has no tokenizer; prompts need one")
        if config.length > target.max_position:
            raise ValueError(
                f"`length` is {config.length}; {model.name!r} has "
                f"{target.max_position} positions"
            )
        self._config = config
        several = config.most_answers != 1
        self.turns: Turns | None = None
        if config.invent or several:
            self.turns = invented_turns(tokenizer, target.eos_ids)
        room = config.length - max(1, int(config.length * ROOM))
        if self.turns is not None and len(self.turns.opening) > room:
            raise ValueError(
                f"`length` is {config.length}; the chat template alone has "
                f"{len(self.turns.opening)} tokens"
            )
        everything = [_encode(tokenizer, prompt, config.chat) for prompt in prompts]
        self.used = [i for i, ids in enumerate(everything) if 0 < len(ids) <= room]
        self.left_out = len(everything) - len(self.used)
        self._openings = [everything[i] for i in self.used]
        if not self.used and config.invent < 1:
            given = f"{len(everything)} prompts" if everything else "no prompts"
            raise ValueError(
                f"{given} given, none with 1..{room} tokens, chat template included; "
                "give others, longer sequences, or invent=1"
            )
        if self.left_out:
            logger.info(
                "%d of %d prompts have more than %d tokens and are left out",
                self.left_out, len(everything), room,
            )  # fmt: skip
        self._order = spread(config.temperatures)
        self._seeds = np.asarray(fold_seeds(config.seed, config.sequences))

    def job(self, index: int) -> Job:
        """The sequence with this index."""
        share = round(self._config.invent * PARTS)
        before, after = index * share // PARTS, (index + 1) * share // PARTS
        invented, number = after > before, index - before
        seed, turns = self._seeds[index], self.turns
        if invented and turns is not None:
            heat = self._order[index % len(self._order)]
            return Job(turns.opening, True, heat, seed, -1)
        again, which = divmod(number, len(self._openings))
        # Prompts that come again take another temperature.
        heat = self._order[(index + again) % len(self._order)]
        return Job(self._openings[which], False, heat, seed, self.used[which])


def spread(mix: Sequence[tuple[float, int]]) -> list[float]:
    """Every temperature as often as its weight says, as evenly as can be.

    Example:
      >>> spread([(0.0, 3), (0.7, 1), (1.0, 2)])
      [0.0, 1.0, 0.0, 0.7, 1.0, 0.0]
    """
    shrink = math.gcd(*(weight for _, weight in mix))
    places = [
        ((turn + 0.5) * shrink / weight, entry, heat)
        for entry, (heat, weight) in enumerate(mix)
        for turn in range(weight // shrink)
    ]
    return [heat for _, _, heat in sorted(places)]


def _encode(tokenizer: Tokenizer, prompt: Prompt, chat: bool) -> tuple[int, ...]:
    if chat:
        return tuple(tokenizer.encode(render_chat(tokenizer, prompt), special=False))
    if not isinstance(prompt, str):
        raise ValueError("a conversation needs chat=True; plain text is a string")
    return tuple(tokenizer.encode(prompt))
