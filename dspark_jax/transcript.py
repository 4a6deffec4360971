"""The host's record of one request: tokens to text, stop strings, statistics."""

from __future__ import annotations

import dataclasses

from dspark_jax.decoding.state import FINISH_REASONS, STOP
from dspark_jax.results import RoundLog, Stats
from dspark_jax.text import StopMatcher, StreamDecoder, Tokenizer
from pallas_kernels import Implementation


class Transcript:
    """Takes rounds of emitted tokens and tells what to show.

    Attributes:
      text: text so far, up to a stop string.
      tokens: tokens kept so far.
      logprobs: of the tokens kept.
      logs: of the rounds, as far as they were given.
      finish_reason: None while running.
      fresh: tokens kept of the last round.
      dropped: tokens of the last round behind a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: tuple[str, ...],
        draft_length: int,
        one_by_one: bool = False,
    ):
        """Starts empty; `stops` are validated here.

        `one_by_one`: rounds evaluate a row for each token they emit, not all rows.
        """
        self._one_by_one = one_by_one
        self._decoder = StreamDecoder(tokenizer)
        self._matcher = StopMatcher(stops)
        self._kept = [0] * draft_length
        self._proposed = [0] * draft_length
        self.rounds = 0
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.logs: list[RoundLog] = []
        self.finish_reason: str | None = None
        self.fresh: list[int] = []
        self.dropped = 0

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None

    def take(
        self,
        emitted: list[int],
        kept: int,
        drafted: int,
        logprobs: list[float],
        finish: int,
        prefill: bool,
        log: RoundLog | None = None,
    ) -> str:
        """Records a round and returns the text to show now.

        Args:
          emitted: the round's tokens.
          kept: accepted drafts among them.
          drafted: drafts that the round verified.
          logprobs: of the tokens, or nothing.
          finish: index into `FINISH_REASONS`.
          prefill: whether this is the token after the prompt, which belongs to
            no round.
          log: of the round; what a stop string cuts off is taken off it.
        """
        shown, used = "", 0
        for position, token in enumerate(emitted):
            used += 1
            is_stop = finish == STOP and position == len(emitted) - 1
            # A stop token ends the text and is no part of it.
            piece = "" if is_stop else self._decoder.feed([token])
            shown += self._matcher.feed(piece)
            if self._matcher.match is not None:
                break
        self.fresh, self.dropped = emitted[:used], len(emitted) - used
        self.tokens += self.fresh
        self.logprobs += logprobs[:used]
        if not prefill:
            self.rounds += 1
            for position in range(min(kept, used)):
                self._kept[position] += 1
            for position in range(drafted):
                self._proposed[position] += 1
        if log is not None:
            self.logs.append(_cut(log, used))
        if self._matcher.match is not None:
            self.finish_reason = "stop_string"
        elif finish:
            shown += self._matcher.finish(self._decoder.flush())
            stopped = self._matcher.match is not None
            self.finish_reason = "stop_string" if stopped else FINISH_REASONS[finish]
        self.text += shown
        return shown

    def stats(
        self,
        seconds: float,
        compile_seconds: float,
        programs: int,
        implementation: Implementation,
    ) -> Stats:
        """Statistics of the request."""
        rounds, drafted = self.rounds, sum(self._proposed)
        in_rounds = len(self.tokens) - 1
        return Stats(
            rounds=rounds,
            generated=len(self.tokens),
            drafted=drafted,
            verified_rows=in_rounds if self._one_by_one else drafted + rounds,
            accepted_length=in_rounds / rounds if rounds else 0.0,
            acceptance=tuple(
                kept / max(proposed, 1)
                for kept, proposed in zip(self._kept, self._proposed, strict=True)
            )
            if rounds
            else (),
            tokens_per_second=in_rounds / seconds if rounds and seconds > 0 else 0.0,
            compile_seconds=compile_seconds,
            programs=programs,
            implementation=implementation,
        )


def _cut(log: RoundLog, used: int) -> RoundLog:
    """The log of a round of which `used` tokens are kept."""
    stopped = log.stopped and used == log.emitted
    accepted = min(log.accepted, used)
    return dataclasses.replace(log, accepted=accepted, emitted=used, stopped=stopped)
