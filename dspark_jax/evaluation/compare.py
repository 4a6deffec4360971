"""The same prompts with and without drafts, taking turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dspark_jax.generate import stream
from dspark_jax.model import Model
from dspark_jax.results import Piece, Result
from dspark_jax.scheduling.cost_model import Costs
from dspark_jax.scheduling.policy import Policy
from dspark_jax.settings import Buckets, SamplingParams
from dspark_jax.text import render_chat

Listener = Callable[[Piece], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How prompts are run.

    Attributes:
      draft_length: of the speculative runs; 0 leaves them out.
      max_new_tokens: tokens a prompt.
      temperature: 0 is greedy; otherwise prompt i is seeded with i.
      chat: whether prompts are rendered as chats.
      policy: of the speculative runs; None verifies all drafts.
      costs: for policies that weigh time.
    """

    draft_length: int
    max_new_tokens: int
    temperature: float = 0.0
    chat: bool = True
    policy: Policy | None = None
    costs: Costs | None = None


@dataclasses.dataclass(frozen=True)
class Pair:
    """One prompt's results; `speculative` is None without a draft."""

    domain: str
    prompt: str
    plain: Result
    speculative: Result | None

    @property
    def identical(self) -> bool:
        """Whether both gave the same tokens."""
        return self.speculative is None or self.plain.tokens == self.speculative.tokens


@dataclasses.dataclass(frozen=True)
class Summary:
    """Figures of several prompts.

    Attributes:
      prompts: how many.
      plain: tokens a second without drafts, over all rounds together.
      speculative: with drafts, or None.
      ratio: speculative / plain.
      accepted_length: tokens a round, the bonus token included.
      acceptance: by position, the share of rounds that kept the draft.
      identical: prompts whose tokens are the same in both runs.
    """

    prompts: int
    plain: float
    speculative: float | None
    ratio: float | None
    accepted_length: float | None
    acceptance: tuple[float, ...]
    identical: int

    def to_json(self, *, representative: bool, greedy: bool) -> dict[str, Any]:
        """JSON-ready; figures that would mean nothing are left out."""
        out: dict[str, Any] = {
            "prompts": self.prompts,
            "plain_tokens_per_second": self.plain,
            "speculative_tokens_per_second": self.speculative,
            "ratio": self.ratio,
        }
        if representative:
            out["accepted_length"] = self.accepted_length
            out["acceptance"] = list(self.acceptance)
        if greedy:
            out["identical"] = self.identical
        return out


def compare(
    model: Model,
    prompts: Mapping[str, Sequence[str]],
    settings: Settings,
    *,
    listener: Callable[[str, str], Listener | None] = lambda domain, prompt: None,
) -> Iterator[Pair]:
    """Runs every prompt both ways, one after the other.

    Which way goes first alternates, so that a slow drift of the machine touches
    both alike. Domains take turns too.

    Args:
      model: from `load`.
      prompts: by domain.
      settings: see there.
      listener: called with domain and prompt; what it returns is given the pieces
        of the speculative run, or of the plain one where that is the only one.
    """
    turn = 0
    for row in range(max(len(texts) for texts in prompts.values())):
        for domain, texts in prompts.items():
            if row >= len(texts):
                continue
            prompt = texts[row]
            listen = listener(domain, prompt)
            if settings.draft_length == 0:
                plain = _run(model, prompt, settings, 0, row, listen)
                yield Pair(domain, prompt, plain, None)
                continue
            lengths = (0, settings.draft_length)
            results: dict[int, Result] = {}
            for n in lengths if turn % 2 == 0 else lengths[::-1]:
                heard = listen if n else None
                results[n] = _run(model, prompt, settings, n, row, heard)
            turn += 1
            yield Pair(domain, prompt, results[0], results[settings.draft_length])


def warm_up(model: Model, prompts: Iterable[str], settings: Settings) -> int:
    """Compiles and runs each program that `prompts` need; how many there are."""
    shapes: dict[tuple, str] = {}
    for prompt in prompts:
        shapes.setdefault(_shape(model, prompt, settings), prompt)
    for prompt in shapes.values():
        for n in sorted({0, settings.draft_length}):
            pieces = _stream(model, prompt, settings, n, 0)
            for _ in range(3):
                next(pieces, None)
    return model.programs.count


def summarise(pairs: Sequence[Pair]) -> Summary:
    """Figures of several prompts; times are added before they are divided."""
    plain = _rate([pair.plain for pair in pairs])
    drafted = [pair.speculative for pair in pairs if pair.speculative is not None]
    speculative = _rate(drafted) if drafted else None
    rounds = sum(r.stats.rounds for r in drafted)
    emitted = sum(len(r.tokens) - 1 for r in drafted)
    columns = max((len(r.stats.acceptance) for r in drafted), default=0)
    kept = [0.0] * columns
    for result in drafted:
        for position, share in enumerate(result.stats.acceptance):
            kept[position] += share * result.stats.rounds
    return Summary(
        prompts=len(pairs),
        plain=plain,
        speculative=speculative,
        ratio=speculative / plain if speculative and plain else None,
        accepted_length=emitted / rounds if rounds else None,
        acceptance=tuple(k / rounds for k in kept) if rounds else (),
        identical=sum(pair.identical for pair in pairs),
    )


def _rate(results: Sequence[Result]) -> float:
    """Tokens a second of all rounds; compilation and prefill are not in it."""
    counted = [r for r in results if r.stats.tokens_per_second > 0]
    tokens = sum(len(r.tokens) - 1 for r in counted)
    seconds = sum((len(r.tokens) - 1) / r.stats.tokens_per_second for r in counted)
    return tokens / seconds if seconds else 0.0


def _run(
    model: Model,
    prompt: str,
    settings: Settings,
    draft_length: int,
    seed: int,
    listen: Listener | None,
) -> Result:
    result = None
    for piece in _stream(model, prompt, settings, draft_length, seed):
        if listen is not None:
            listen(piece)
        result = piece.result or result
    assert result is not None  # The last piece of a request carries it.
    return result


def _stream(
    model: Model, prompt: str, settings: Settings, draft_length: int, seed: int
) -> Iterator[Piece]:
    return stream(
        model,
        prompt,
        max_new_tokens=settings.max_new_tokens,
        sampling=SamplingParams(temperature=settings.temperature, seed=seed),
        draft_length=draft_length,
        policy=settings.policy if draft_length else None,
        costs=settings.costs,
        chat=settings.chat,
    )


def _shape(model: Model, prompt: str, settings: Settings) -> tuple:
    """Buckets that a prompt falls into: chunk of the prefill, and capacity."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        return ()
    text = render_chat(tokenizer, prompt) if settings.chat else prompt
    length = len(tokenizer.encode(text, special=not settings.chat))
    buckets = Buckets()
    # A prompt beyond the largest chunk ends in a chunk of its own size.
    last = buckets.prefill[-1]
    chunks = (length > last, Buckets.fit(length % last or last, buckets.prefill))
    return *chunks, Buckets.fit(length + settings.max_new_tokens, buckets.capacity)
