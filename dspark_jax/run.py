"""Prepared requests through the host loop: rounds in, pieces of text out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from dspark_jax.decoding.batch import Batch, HostRound, Settings
from dspark_jax.decoding.matching import Guide, Matcher
from dspark_jax.decoding.requests import Requests, holds_rows, select
from dspark_jax.decoding.shapes import choose_shapes
from dspark_jax.decoding.state import STOP
from dspark_jax.memory import check_memory
from dspark_jax.model import Model
from dspark_jax.probe import equivalence_of
from dspark_jax.results import ChatState, Piece, Result, RoundLog
from dspark_jax.settings import Buckets, SamplingParams
from dspark_jax.transcript import Transcript


@dataclass(frozen=True)
class Call:
    """What one call of `stream` asks for.

    Attributes:
      sampling: of each request.
      requests: the same as arrays.
      draft_length: drafts a round.
      capacity: cache positions a request.
      budget: tokens a request may emit.
      places: requests decoded together at most.
      settings: what the rounds do.
      matchers: of each request, or None where all are free.
      deterministic: see `stream`.
      fixed_capacity: the capacity was asked for, and is not to be padded.
    """

    sampling: Sequence[SamplingParams]
    requests: Requests
    draft_length: int
    capacity: int
    budget: int
    places: int
    settings: Settings
    matchers: Sequence[Matcher | None] | None = None
    deterministic: bool = False
    fixed_capacity: bool = False


def run(
    model: Model,
    ids: Sequence[Sequence[int]],
    call: Call,
    transcripts: Sequence[Transcript],
    earlier: Batch | None,
) -> Iterator[Piece]:
    """Decodes as many requests together as there are places; others wait for one.

    Args:
      model: the model.
      ids: tokens to add to each request.
      call: see `Call`.
      transcripts: one a request, empty.
      earlier: the batch that the requests go on in; None starts anew.

    Yields:
      Pieces, each request's last one with its `Result`.
    """
    programs, extras = model.programs, call.settings.extras
    compiled_before = programs.seconds
    batch = _prepare(model, min(call.places, len(ids)), call, earlier)
    count = batch.count
    # The request in each place, and those without one.
    inside, waiting = list(range(count)), deque(range(count, len(ids)))
    began = [(0.0, 0.0)] * len(ids)
    guide = _guide(model, call, batch)
    proposed: list[list[int]] = [[] for _ in range(count)]

    def take(out: HostRound, places: Sequence[int], first: bool) -> list:
        """Enters a round; (request, where it stands, shown text) of these places."""
        taken: list[tuple[int, ChatState, str]] = []
        if guide is not None:
            guide.take(out.emitted)
        for place in places:
            index = inside[place]
            transcript = transcripts[index]
            if transcript.done or not out.present[place]:
                continue
            proposed[place] = out.proposed[place]
            if first:
                began[index] = time.perf_counter(), programs.seconds
            log = None
            if extras.trace and not first:
                log = _log(out, place, call.sampling[index].greedy)
            text = transcript.take(
                out.emitted[place], out.kept[place], out.drafted[place],
                out.logprobs[place], out.finish[place], first, log,
            )  # fmt: skip
            taken.append((index, ChatState(batch, place, batch.turn), text))
            if transcript.done:
                batch.end(place, len(batch.tokens[place]) - transcript.dropped)
        return taken

    masks = None if guide is None else guide.first()
    out, first = batch.start(ids[:count], [call.budget] * count, masks), True
    while True:
        if not waiting and guide is None:
            batch.launch_ahead()
        taken, first = take(out, range(count), first), False
        while waiting:
            free = [p for p in range(count) if transcripts[inside[p]].done]
            free = free[: len(waiting)]
            if not free:
                break
            new = [waiting.popleft() for _ in free]
            # Of one shape where bits must not depend on who joins together.
            least = batch.size if call.deterministic else len(new)
            size = Buckets.fit(least, Buckets().batch) or least
            for place, index in zip(free, new, strict=True):
                inside[place] = index
                if guide is not None:
                    guide.join(place, *_rule(model, call, index))
            masks = None if guide is None else guide.first(free, size)
            out = batch.join(
                free,
                [ids[index] for index in new],
                [call.budget] * len(new),
                select(call.requests, new, size),
                masks,
            )
            taken += take(out, free, True)
        over = all(transcripts[index].done for index in inside)
        if guide is None:
            batch.launch_ahead()
        elif not over:
            running = [not transcripts[index].done for index in inside]
            batch.launch(guide.masks(proposed, running))
        if over:
            # A round launched for nothing belongs to the time, too.
            batch.settle()
        now = time.perf_counter(), programs.seconds
        for index, state, text in taken:
            transcript = transcripts[index]
            piece = Piece(index, text, transcript.fresh)
            if transcript.done:
                spent, compiling = (
                    b - a for a, b in zip(began[index], now, strict=True)
                )
                result = Result(
                    text=transcript.text,
                    tokens=transcript.tokens,
                    finish_reason=transcript.finish_reason or "length",
                    logprobs=transcript.logprobs if extras.logprobs else None,
                    rounds=tuple(transcript.logs) if extras.trace else None,
                    stats=transcript.stats(
                        seconds=spent - compiling,
                        compile_seconds=programs.seconds - compiled_before,
                        programs=programs.count,
                        implementation=model.spec.implementation_here,
                    ),
                    state=state,
                )
                reason = result.finish_reason
                yield replace(piece, finish_reason=reason, result=result)
            elif text or transcript.fresh:
                yield piece
        if over:
            return
        out = batch.receive()


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


def _guide(model: Model, call: Call, batch: Batch) -> Guide | None:
    """What follows the matchers; None where no request has one."""
    if call.matchers is None or all(one is None for one in call.matchers):
        return None
    rules = [_rule(model, call, index) for index in range(batch.count)]
    matchers, stops = zip(*rules, strict=True)
    vocab = model.spec.target.vocab_size
    return Guide(matchers, stops, batch.size, vocab, call.draft_length)


def _rule(
    model: Model, call: Call, index: int
) -> tuple[Matcher | None, Collection[int]]:
    """A request's matcher, and the ids that end it."""
    own = call.sampling[index].stop_ids
    matcher = None if call.matchers is None else call.matchers[index]
    return matcher, model.spec.target.eos_ids if own is None else own


def _prepare(model: Model, count: int, call: Call, batch: Batch | None) -> Batch:
    """A batch for `count` requests or fewer, or the earlier one with new settings."""
    spec, settings, capacity = model.spec, call.settings, call.capacity
    sampled = holds_rows(settings.variant)
    size = Buckets.fit(count, Buckets().batch) or count
    if batch is not None:
        count, size = batch.count, batch.size
        capacity = max(capacity, batch.capacity)
    if call.deterministic:
        shapes = choose_shapes(
            spec,
            equivalence_of(model),
            count=size if batch is not None else count,
            draft_length=call.draft_length,
            capacity=capacity,
            scheduled=settings.policy is not None,
            one_size=sampled,
            fixed_batch=batch is not None,
            fixed_capacity=call.fixed_capacity,
        )
        settings = replace(settings, shapes=shapes)
        size, capacity = shapes.batch, shapes.capacity
        count = min(count, size)
    requests = select(call.requests, range(count), size)
    if batch is not None:
        batch.resettle(requests, settings)
        batch.reserve(capacity)
        return batch
    check_memory(spec, size, capacity, call.draft_length, sampled)
    return Batch(
        spec, model.params, model.programs, requests, count, capacity,
        call.draft_length, settings,
    )  # fmt: skip
