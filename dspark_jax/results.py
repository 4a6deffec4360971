"""What generation returns: text, tokens, the reason it ended, statistics."""

from __future__ import annotations

import dataclasses
from typing import Any

from dspark_jax.decoding.batch import Batch
from pallas_kernels import Implementation


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of one request.

    Attributes:
      rounds: verification rounds.
      generated: tokens returned, the prefill's token included.
      drafted: tokens proposed for verification.
      verified_rows: target rows evaluated in rounds.
      accepted_length: tokens a round, the bonus token included, over all rounds
        (0 without a round); the prefill's token belongs to no round.
      acceptance: by position, the share of rounds that proposed the position
        and kept it.
      tokens_per_second: over the rounds; compilation and prefill are excluded.
        What the caller of `stream` does between pieces counts, as the device
        works on meanwhile, and so do the prefills of requests that join.
      compile_seconds: time the call spent compiling.
      programs: programs compiled for the model so far.
      implementation: of sampling and verification, "reference" or "pallas".
    """

    rounds: int
    generated: int
    drafted: int
    verified_rows: int
    accepted_length: float
    acceptance: tuple[float, ...]
    tokens_per_second: float = 0.0
    compile_seconds: float = 0.0
    programs: int = 0
    implementation: Implementation = "reference"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**dataclasses.asdict(self), "acceptance": list(self.acceptance)}


@dataclasses.dataclass(frozen=True)
class RoundLog:
    """One verification round of one request.

    Counts are of what was published: a stop token, a stop string, the token limit and
    the end of the cache cut a round. Where `emitted == accepted` the round ended
    without a token of the target's own, and the drafts behind were cut off, not
    rejected.

    Attributes:
      drafted: drafts that were verified.
      accepted: length of the accepted prefix, as far as it was emitted.
      emitted: tokens emitted.
      stopped: an accepted draft was a stop token and ended the request.
      position: committed tokens before the round, prompt and anchor included.
      confidence: logit of each verified draft's chance to be accepted once the ones
        before it were, as the draft's head gave it; () without a head.
      overlap: by verified draft, `sum_v min(p_v, q_v)` of the target's row and the
        row the draft was drawn from, under the request's temperature and filters:
        the chance that a draft from there is accepted. From integer rows over their
        total; behind the first rejected draft the rows go on from drafts that were
        not emitted. () where drafts are not drawn from rows: greedy requests and
        shared noise.
    """

    drafted: int
    accepted: int
    emitted: int
    stopped: bool
    position: int
    confidence: tuple[float, ...]
    overlap: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready."""
        out = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}


@dataclasses.dataclass(frozen=True)
class ChatState:
    """Where a request stands, to go on from without a new prefill.

    A state serves once: going on moves it. The requests of one call go on
    together. With more prompts than places, a request that ended gives its place
    away, and its state ends with it.

    Attributes:
      batch: the requests' shared device state.
      row: the request's place in it.
      turn: the batch's turn that it was made in.
    """

    batch: Batch = dataclasses.field(repr=False)
    row: int
    turn: int

    @property
    def tokens(self) -> list[int]:
        """Committed ids, prompt included; ValueError for a state that was moved on."""
        if self.turn != self.batch.turn:
            raise ValueError(
                "this state was moved on by a later call, or its place was given to "
                "another request"
            )
        return list(self.batch.tokens[self.row])


@dataclasses.dataclass(frozen=True)
class Result:
    """One request's result.

    Attributes:
      text: what was generated; ends before a stop string and without the stop
        token.
      tokens: generated ids; a stop token is the last one, and the token that
        completed a stop string is kept.
      finish_reason: "stop" (a stop token), "stop_string", "length"
        (max_new_tokens) or "cache_full".
      logprobs: of `tokens` under the target's unscaled, unfiltered law; None
        unless asked for.
      stats: statistics.
      state: for the next turn.
      rounds: the log of the verification rounds; None unless asked for.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    logprobs: list[float] | None
    stats: Stats
    state: ChatState = dataclasses.field(repr=False)
    rounds: tuple[RoundLog, ...] | None = dataclasses.field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, without the state; rounds where they were asked for."""
        logs = self.rounds and [one.to_json() for one in self.rounds]
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "logprobs": self.logprobs,
            "stats": self.stats.to_json(),
            **({} if self.rounds is None else {"rounds": list(logs or ())}),
        }


@dataclasses.dataclass(frozen=True)
class Piece:
    """A step of a stream.

    Attributes:
      index: the prompt it belongs to.
      text: new text; may be empty while a character or a stop string is open.
      tokens: new ids.
      finish_reason: None until the request's last piece.
      result: the whole result, with the last piece.
    """

    index: int
    text: str
    tokens: list[int]
    finish_reason: str | None = None
    result: Result | None = None
