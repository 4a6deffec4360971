"""Prepared requests through the host loop: rounds in, pieces of text out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark_jax.decoding.batch import Batch, HostRound, Settings
from dspark_jax.decoding.extras import Extras
from dspark_jax.decoding.requests import holds_rows, pack_requests, variant_of
from dspark_jax.decoding.state import STOP
from dspark_jax.memory import check_memory
from dspark_jax.model import Model
from dspark_jax.results import ChatState, Piece, Result, RoundLog
from dspark_jax.scheduling.cost_model import Costs
from dspark_jax.scheduling.policy import Scheduled
from dspark_jax.settings import Buckets, SamplingParams
from dspark_jax.transcript import Transcript


@dataclass(frozen=True)
class Call:
    """What one call of `stream` asks for.

    Attributes:
      settings: of each request.
      seeds: uint32[requests, 2].
      draft_length: drafts a round.
      capacity: cache positions a request.
      budget: tokens a request may emit.
      extras: what is wanted beside tokens.
      noisy: whether draft and target share noise.
      policy: how many of the drafts a request verifies; None is all.
      costs: measured times, for policies that weigh them.
      deterministic: see `stream`.
    """

    settings: Sequence[SamplingParams]
    seeds: np.ndarray
    draft_length: int
    capacity: int
    budget: int
    extras: Extras
    noisy: bool
    policy: Scheduled | None = None
    costs: Costs | None = None
    deterministic: bool = False


def run(
    model: Model,
    ids: Sequence[Sequence[int]],
    call: Call,
    transcripts: Sequence[Transcript],
    earlier: Sequence[Batch] | None,
) -> Iterator[Piece]:
    """Decodes groups of at most the largest batch bucket, one after the other.

    Args:
      model: the model.
      ids: tokens to add to each request.
      call: see `Call`.
      transcripts: one a request, empty.
      earlier: the batch that each request goes on in; None starts anew.

    Yields:
      Pieces, each request's last one with its `Result`.
    """
    largest = Buckets().batch[-1]
    for first in range(0, len(ids), largest):
        part = slice(first, first + largest)
        mine = replace(call, settings=call.settings[part], seeds=call.seeds[part])
        batch = earlier[first] if earlier else None
        group = _run_group(model, ids[part], mine, transcripts[part], batch)
        for piece in group:
            yield replace(piece, index=first + piece.index)


def _run_group(
    model: Model,
    ids: Sequence[Sequence[int]],
    call: Call,
    transcripts: Sequence[Transcript],
    batch: Batch | None,
) -> Iterator[Piece]:
    programs = model.programs
    compiled_before = programs.seconds
    batch = _prepare(model, len(ids), call, batch)
    out = batch.start(ids, [call.budget] * len(ids))
    began, compiled, prefilled = time.perf_counter(), programs.seconds, True
    while True:
        batch.launch_ahead()
        taken: list[tuple[int, Transcript, str]] = []
        for row, transcript in enumerate(transcripts):
            if transcript.done:
                continue
            log = None
            if call.extras.trace and not prefilled:
                log = _log(out, row, call.settings[row].greedy)
            text = transcript.take(
                out.emitted[row], out.kept[row], out.drafted[row], out.logprobs[row],
                out.finish[row], prefilled, log,
            )  # fmt: skip
            taken.append((row, transcript, text))
            if transcript.done:
                batch.end(row, len(batch.tokens[row]) - transcript.dropped)
        over = all(transcript.done for transcript in transcripts)
        if over:
            # A round launched for nothing belongs to the time, too.
            batch.settle()
        compiling = programs.seconds - compiled
        spent = 0.0 if prefilled else time.perf_counter() - began - compiling
        for row, transcript, text in taken:
            piece = Piece(row, text, transcript.fresh)
            if transcript.done:
                stats = transcript.stats(
                    seconds=spent,
                    compile_seconds=programs.seconds - compiled_before,
                    programs=programs.count,
                    implementation=model.spec.implementation_here,
                )
                result = Result(
                    text=transcript.text,
                    tokens=transcript.tokens,
                    finish_reason=transcript.finish_reason or "length",
                    logprobs=transcript.logprobs if call.extras.logprobs else None,
                    rounds=tuple(transcript.logs) if call.extras.trace else None,
                    stats=stats,
                    state=ChatState(batch, row, batch.turn),
                )
                reason = result.finish_reason
                yield replace(piece, finish_reason=reason, result=result)
            elif text or transcript.fresh:
                yield piece
        if over:
            return
        out = batch.receive()
        prefilled = False


def _log(out: HostRound, row: int, greedy: bool) -> RoundLog:
    """A request's round as it was published, before stop strings."""
    emitted, kept = len(out.emitted[row]), out.kept[row]
    # A greedy request in a program that holds rows has one-hot ones.
    overlap = () if greedy else tuple(out.overlap[row])
    return RoundLog(
        drafted=out.drafted[row],
        accepted=kept,
        emitted=emitted,
        stopped=out.finish[row] == STOP and kept == emitted,
        position=out.position[row],
        confidence=tuple(out.confidence[row]),
        overlap=overlap,
    )


def _prepare(model: Model, count: int, call: Call, batch: Batch | None) -> Batch:
    """A batch for `count` requests, or the earlier one with new settings."""
    spec = model.spec
    size = Buckets.fit(count, Buckets().batch) or count
    padded = [*call.settings, *[SamplingParams()] * (size - count)]
    words = np.zeros((size, 2), np.uint32)
    words[:count] = call.seeds
    requests = pack_requests(padded, words, spec.target.eos_ids)
    variant = variant_of(call.settings, call.noisy)
    settings = Settings(
        variant, call.extras, call.policy, call.costs, call.deterministic
    )
    if batch is not None:
        batch.resettle(requests, settings)
        batch.reserve(call.capacity)
        return batch
    check_memory(spec, size, call.capacity, call.draft_length, holds_rows(variant))
    return Batch(
        spec, model.params, model.programs, requests, count, call.capacity,
        call.draft_length, settings,
    )  # fmt: skip
