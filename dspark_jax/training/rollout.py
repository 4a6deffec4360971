"""Sequences written by the target, many at once, through the rounds of decoding.

Every sequence of a batch has a cursor: the position of the token that is fed next. A
round feeds one token of each sequence and draws the one after it. Where that
one is known, because a prompt or a header says so, the draw is dropped; otherwise it
is what the model wrote.

    tokens   p p p p p a a          p known, a written
    cursor         ^                the draw here is dropped, that at the last a kept

Prompts therefore need no program of their own, and a sequence that has ended makes
room for the next one at once. A next sequence that begins with the same tokens goes
on behind them: the caches are addressed by position and hold them already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding.extras import Extras
from dspark_jax.decoding.requests import Variant, pack_requests
from dspark_jax.decoding.state import RUNNING, STOP
from dspark_jax.memory import check_memory
from dspark_jax.model import Model
from dspark_jax.settings import SamplingParams
from dspark_jax.training.sequences import ANSWER, FORCED, QUESTION
from dspark_jax.training.turns import Turns
from pallas_kernels import scale_of

# Of the questions that the model invents.
QUESTION_TEMPERATURE = 1.0


@dataclasses.dataclass(frozen=True)
class Job:
    """A sequence to write.

    Attributes:
      opening: ids that it begins with.
      invented: whether the model goes on with a question, or an answer.
      temperature: of the answers.
      seed: uint32[2].
      prompt: index of the prompt; -1 for an invented question.
    """

    opening: tuple[int, ...]
    invented: bool
    temperature: float
    seed: np.ndarray
    prompt: int


class Written:
    """A sequence on its way.

    Attributes:
      tokens: known ids.
      roles: who wrote each.
      cursor: position of the token to feed.
      over: whether nothing follows.
    """

    def __init__(
        self,
        job: Job,
        length: int,
        stop_ids: Sequence[int],
        turns: Turns | None,
        answers: int | None,
    ):
        """A sequence of up to `length` tokens and `answers` answers (None: any)."""
        self.job = job
        self._length, self._stops = length, frozenset(stop_ids)
        self._turns, self._answers = turns, answers
        self._writing = QUESTION if job.invented else ANSWER
        self.tokens: list[int] = []
        self.roles: list[int] = []
        self.cursor, self.over = 0, False
        self._add(job.opening, FORCED)

    @property
    def temperature(self) -> float:
        """Of the token that is drawn next."""
        question = self._writing == QUESTION
        return QUESTION_TEMPERATURE if question else self.job.temperature

    def skip(self, cached: Sequence[int]) -> None:
        """Moves the cursor behind tokens that the caches hold already.

        The last known token is always fed: the first draw needs its row.
        """
        pairs = zip(cached, self.tokens[:-1], strict=False)
        self.cursor = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def take(self, drawn: int) -> None:
        """Moves on by one; `drawn` counts if the next token is not known."""
        self.cursor += 1
        if self.cursor < len(self.tokens):
            return
        wrote = self._writing
        self._add([drawn], wrote)
        if drawn not in self._stops:
            return
        turns, left = self._turns, True
        if wrote == ANSWER and self._answers is not None:
            self._answers -= 1
            left = self._answers > 0
        if turns is None or drawn != turns.close or not left:
            self.over = True
        elif wrote == QUESTION:
            self._writing = ANSWER
            self._add(turns.answer_header, FORCED)
        else:
            self._writing = QUESTION
            self._add(turns.question_header, FORCED)

    def _add(self, ids: Sequence[int], role: int) -> None:
        ids = list(ids)[: self._length - len(self.tokens)]
        self.tokens += ids
        self.roles += [role] * len(ids)
        self.over = self.over or len(self.tokens) >= self._length


def roll_out(
    model: Model,
    jobs: Sequence[Job],
    *,
    batch: int,
    length: int,
    variant: Variant,
    turns: Turns | None = None,
    answers: int | None = 1,
    tick: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, Written]]:
    """Writes all sequences, `batch` of them at a time.

    A sequence depends on its job and the target only: its draws come from (seed,
    position), and its rows see nothing of its neighbours. Another batch size may
    round sums in another way.

    Args:
      model: its target writes.
      jobs: in the order in which they are begun.
      batch: B.
      length: S, tokens of a sequence.
      variant: "sampled", or "greedy" if no draw is at a temperature.
      turns: how a sequence goes on after an answer; None ends it there.
      answers: most answers of a sequence; None: until it is full.
      tick: told after every round how many positions are known, of all jobs so far.

    Yields:
      (index of the job, sequence), in the order in which they end.

    Raises:
      ValueError: not enough memory, or logits without a finite maximum.
    """
    spec, programs = model.spec, model.programs
    check_memory(spec, batch, length, 0, variant == "sampled")
    state = programs.init(batch, length, 0)
    requests = pack_requests(
        [SamplingParams(stop_ids=())] * batch, np.zeros((batch, 2), np.uint32), ()
    )
    waiting = iter(enumerate(jobs))
    rows: list[tuple[int, Written] | None] = [None] * batch
    cached: list[list[int]] = [[] for _ in rows]
    ended = 0

    def begin(row: int) -> None:
        rows[row] = None
        for index, job in waiting:
            one = Written(job, length, spec.target.eos_ids, turns, answers)
            one.skip(cached[row])
            rows[row] = (index, one)
            return

    for row in range(batch):
        begin(row)
    while any(rows):
        # New arrays every round: the device may still read the last ones.
        live = [one for _, one in filter(None, rows)]
        at = [row for row, pair in enumerate(rows) if pair is not None]
        anchor, cursor = np.zeros((2, batch), np.int32)
        heat, seeds = np.zeros(batch), np.zeros((batch, 2), np.uint32)
        finish = np.full(batch, STOP, np.int32)
        anchor[at] = [one.tokens[one.cursor] for one in live]
        cursor[at] = [one.cursor for one in live]
        heat[at] = [one.temperature for one in live]
        seeds[at] = [one.job.seed for one in live]
        finish[at] = RUNNING
        state = dataclasses.replace(
            state,
            anchor=jnp.asarray(anchor.copy()),
            length=jnp.asarray(cursor.copy()),
            budget=jnp.asarray(np.full(batch, length, np.int32)),
            finish=jnp.asarray(finish),
        )
        requests = dataclasses.replace(
            requests, scale=jnp.asarray(scale_of(heat)), seeds=jnp.asarray(seeds)
        )
        state, out = programs.round(model.params, state, requests, variant, Extras())
        drawn = programs.fetch(out.emitted)[:, 0].tolist()
        for row in at:
            pair = rows[row]
            assert pair is not None
            index, one = pair
            if drawn[row] < 0:
                raise ValueError(
                    f"sequence {index} got logits without a finite maximum (NaN or "
                    "inf); check the weights"
                )
            one.take(drawn[row])
            if one.over:
                cached[row] = one.tokens[: one.cursor]
                ended += length
                yield index, one
                begin(row)
        if tick is not None:
            tick(ended + sum(len(one.tokens) for _, one in filter(None, rows)))
