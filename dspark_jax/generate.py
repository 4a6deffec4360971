"""Text in, text out: `generate` and `stream`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.config import require
from dspark_jax.decoding.batch import Batch, Settings
from dspark_jax.decoding.extras import Extras
from dspark_jax.decoding.matching import Matcher, check_matchers
from dspark_jax.decoding.plans import check_deterministic, check_seeds, policy_length
from dspark_jax.decoding.requests import (
    check_verification,
    listed_requests,
    variant_of,
)
from dspark_jax.decoding.words import seed_words
from dspark_jax.errors import CacheFull
from dspark_jax.model import Model
from dspark_jax.processes import fresh_words
from dspark_jax.results import ChatState, Piece, Result
from dspark_jax.run import Call, run
from dspark_jax.scheduling.cost_model import Costs
from dspark_jax.scheduling.policy import Policy
from dspark_jax.settings import Buckets, SamplingParams
from dspark_jax.text import Tokenizer, next_turn, render_chat
from dspark_jax.transcript import Transcript

Prompt = str | Sequence[Mapping[str, Any]]
REFUSED = {
    "logit_bias": "a bias on logits",
    "repetition_penalty": "a penalty",
    "presence_penalty": "a penalty",
    "frequency_penalty": "a penalty",
}


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    **options: Any,
) -> Any:
    """Generates text.

    Args:
      model: from `load`.
      prompts: a string or a conversation (a list of `{"role", "content"}`), or
        a list of those. A list gives a list of results.
      **options: see `stream`.

    Returns:
      A `Result`, or one for every prompt of a list.

    Raises:
      ValueError: bad arguments, before anything is compiled.
      CacheFull: a prompt longer than the model's positions.

    Example:
      >>> import dspark_jax as dspark
      >>> model = dspark.testing.tiny_model()
      >>> out = dspark.generate(model, "ab", max_new_tokens=5, chat=False)
      >>> len(out.tokens), out.finish_reason
      (5, 'length')
    """
    single = _is_single(prompts)
    results: dict[int, Result] = {}
    for piece in stream(model, prompts, **options):
        if piece.result is not None:
            results[piece.index] = piece.result
    return results[0] if single else [results[i] for i in range(len(results))]


def stream(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    draft_length: int | None = None,
    policy: Policy | None = None,
    costs: Costs | None = None,
    verification: str = "exact",
    deterministic: bool = False,
    stop: str | Sequence[str] = (),
    chat: bool = True,
    logprobs: bool = False,
    trace: bool = False,
    matchers: Matcher | Sequence[Matcher | None] | None = None,
    state: ChatState | Sequence[ChatState] | None = None,
    capacity: int | None = None,
    batch: int | None = None,
    **refused: Any,
) -> Iterator[Piece]:
    """Generates text piece by piece.

    Arguments are checked at the call; the device works when the iterator is
    advanced. Closing it early ends the requests.

    Args:
      model: from `load`.
      prompts: as for `generate`.
      max_new_tokens: tokens a request may emit, >= 1.
      sampling: settings of all requests, or a list with one entry each. Default
        greedy. One seed for a list of prompts: prompt i draws from
        fold(seed, i).
      draft_length: drafts verified a round, 0..gamma; None is the draft's usual
        number, 0 decodes plainly through the same code.
      policy: how many of the drafts each request verifies, round by round: `Fixed`,
        `Budget`, `EarlyStop`, `Threshold` or `Gate`. None verifies all. No policy
        changes the law of the text.
      costs: measured times of this model, for policies that weigh them; see
        `profile`.
      verification: "exact": the target's distribution, exactly, with as many drafts
        accepted as can be. "shared_noise": draft and target share noise by position,
        so that a seed's text is the same at every draft length, in every batch and
        under every schedule; fewer drafts stand, and a token's law is the target's
        up to the resolution of the noise, see `pallas_kernels.noisy_argmax`.
      deterministic: the same seeds give the same text in every batch, and, greedy or
        with shared noise, at every draft length and under every policy. Programs are
        used that a probe found to give the same bits, see `probe`; others are padded.
        With tokens drawn at a temperature and exact verification the draft length
        must be fixed, and every call is padded to one size.
      stop: strings that end a request; the text ends before them.
      chat: render the model's chat template; False continues plain text.
      logprobs: return log-probabilities of the emitted tokens, under the
        target's law at temperature 1 without filters and masks.
      trace: return a log of the verification rounds, see `RoundLog`.
      matchers: what each request may say, a fresh `Matcher` each, None for a free
        one; for a single prompt also a matcher by itself. The text has the law of
        the target masked at every token. The host has to know the drafts before it
        can say what may follow them, so that no round is launched ahead of the one
        before it; see `dspark_jax.grammar` for matchers of JSON schemas and grammars.
      state: `Result.state` of the same requests, to go on from; the prompts are
        their next turns.
      capacity: cache positions a request may use; default what the call needs. Not
        less than `state` has.
      batch: requests decoded together at most; a request that ends gives its place
        to the next prompt, and cannot be gone on from then. Default the largest batch
        bucket.
      **refused: options that would bend the distribution unseen are refused by
        name.

    Yields:
      `Piece`s; the last one of a request carries its `Result`.

    Raises:
      ValueError: bad arguments.
      CacheFull: a prompt longer than the cache.

    Example:
      >>> import dspark_jax as dspark
      >>> model = dspark.testing.tiny_model()
      >>> pieces = dspark.stream(model, "ab", max_new_tokens=5, chat=False)
      >>> sum(len(piece.tokens) for piece in pieces)
      5
    """
    for name in refused:
        if name == "grammar":
            raise ValueError(
                "`grammar` is not an option; give `matchers`, which "
                "`dspark_jax.grammar` makes from schemas and grammars"
            )
        if name in REFUSED:
            raise ValueError(
                f"`{name}` is not supported: {REFUSED[name]} changes the target's law "
                "with the drafted prefix, which verification does not model; leave "
                "it out"
            )
        raise TypeError(f"unexpected option `{name}`")
    noisy = check_verification(verification)
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"`max_new_tokens` is {max_new_tokens!r}; allowed: int >= 1")
    flags = {"deterministic": deterministic, "logprobs": logprobs, "trace": trace}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"`{name}` is {flag!r}; allowed: a bool")
    n, scheduled = policy_length(model.spec, policy, draft_length)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"model {model.name!r} has no tokenizer; use `generate_tokens` on ids"
        )
    asked: list[Prompt] = [prompts] if _is_single(prompts) else list(prompts)  # type: ignore[arg-type,list-item]
    if not asked:
        raise ValueError("`prompts` is empty; give at least one prompt")
    if matchers is not None:
        matchers = check_matchers(matchers, len(asked), _is_single(prompts))
    row_by_row = model.spec.one_by_one and n > 0
    transcripts = [Transcript(tokenizer, stops, n, row_by_row) for _ in asked]
    if _is_single(prompts) and isinstance(sampling, SamplingParams):
        sampling = [sampling]
    settings, seeds = _settings(sampling, len(asked), model.spec.mesh)
    places = _places(batch)
    before = _earlier(state, len(asked), n, places)
    _check_room(before, capacity)
    known = before.tokens if before else [[]] * len(asked)
    ids = [
        _encode(tokenizer, prompt, chat, one if before else None)
        for prompt, one in zip(asked, known, strict=True)
    ]
    limit = model.spec.target.max_position
    needs = [len(k) + len(i) for k, i in zip(known, ids, strict=True)]
    requests = listed_requests(settings, seeds, model.spec.target.eos_ids)
    variant = variant_of(settings, noisy)
    if deterministic:
        check_deterministic(scheduled, variant)
    check_seeds(scheduled, variant, requests.seeds)
    call = Call(
        sampling=settings,
        requests=requests,
        draft_length=n,
        capacity=_capacity(max(needs), max_new_tokens, capacity, limit),
        budget=max_new_tokens,
        places=places,
        settings=Settings(variant, Extras(logprobs, trace), scheduled, costs),
        matchers=matchers,
        deterministic=deterministic,
        fixed_capacity=capacity is not None,
    )
    return run(model, ids, call, transcripts, before)


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    return bool(prompts) and isinstance(prompts[0], Mapping)


def _settings(
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    mesh: Mesh | None,
) -> tuple[list[SamplingParams], np.ndarray]:
    """Settings and seed words of every request."""
    if sampling is None or isinstance(sampling, SamplingParams):
        one = sampling or SamplingParams()
        words = fresh_words(mesh, 1)[0] if one.seed is None else seed_words(one.seed)
        key = jax.random.wrap_key_data(
            jnp.asarray(np.asarray(words, np.uint32)), impl="threefry2x32"
        )
        words = [
            np.asarray(jax.random.key_data(jax.random.fold_in(key, i)))
            for i in range(count)
        ]
        return [dataclasses.replace(one, seed=None)] * count, np.stack(words)
    settings = list(sampling)
    if len(settings) != count or not all(
        isinstance(s, SamplingParams) for s in settings
    ):
        raise ValueError(
            f"`sampling` has {len(settings)} entries for {count} prompts; give one "
            "SamplingParams for all, or one each"
        )
    return settings, fresh_words(mesh, count)


def _places(batch: int | None) -> int:
    largest = Buckets().batch[-1]
    if batch is None:
        return largest
    ok = isinstance(batch, int) and not isinstance(batch, bool) and batch >= 1
    require(ok and batch <= largest, "batch", batch, f"None or an int in 1..{largest}")
    return batch


def _earlier(
    state: ChatState | Sequence[ChatState] | None, count: int, n: int, places: int
) -> Batch | None:
    """The batch that all requests of an earlier call go on in."""
    if state is None:
        return None
    states = [state] if isinstance(state, ChatState) else list(state)
    if len(states) != count:
        raise ValueError(f"`state` has {len(states)} entries for {count} prompts")
    batch = states[0].batch
    if any(one.turn != one.batch.turn for one in states):
        raise ValueError(
            "`state` was already moved on by a later call, or its place was given to "
            "another request; go on from the latest states, and ask for no more "
            "prompts than `batch` in a call to be gone on from"
        )
    together = all(one.batch is batch for one in states)
    if not together or [one.row for one in states] != list(range(batch.count)):
        raise ValueError(
            "`state` must hold the states of all requests of one earlier call, in "
            "their order"
        )
    if count > places:
        raise ValueError(
            f"`batch` is {places} and `state` has {count} requests, which go on "
            "together; leave `batch` out"
        )
    made = batch.draft_length
    if made != n:
        raise ValueError(
            f"`draft_length` is {n} but the state was made with {made}; go on with "
            "the same one"
        )
    return batch


def _check_room(batch: Batch | None, capacity: int | None) -> None:
    if batch is not None and capacity is not None and capacity < batch.capacity:
        raise ValueError(
            f"`capacity` is {capacity} but the state has {batch.capacity} positions "
            "already; leave it out, or give at least as many"
        )


def _encode(
    tokenizer: Tokenizer, prompt: Prompt, chat: bool, before: list[int] | None
) -> list[int]:
    if before is None:
        if chat:
            ids = tokenizer.encode(render_chat(tokenizer, prompt), special=False)
        else:
            ids = tokenizer.encode(_plain(prompt))
        if not ids:
            raise ValueError("a prompt has no tokens; give some text, or chat=True")
        return ids
    if not chat:
        return tokenizer.encode(_plain(prompt), special=False)
    text = next_turn(tokenizer, prompt, last_token=before[-1])
    return tokenizer.encode(text, special=False)


def _plain(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise ValueError("a conversation needs chat=True; plain text is a string")
    return prompt


def _capacity(need: int, budget: int, capacity: int | None, limit: int) -> int:
    """The cache bucket for prompts of up to `need` tokens and `budget` more."""
    most = limit if capacity is None else min(capacity, limit)
    if need >= most:
        raise CacheFull(
            f"a prompt has {need} tokens and needs room for at least one more; "
            f"`capacity` is {most}"
        )
    wanted = min(need + budget, most)
    return min(Buckets.fit(wanted, Buckets().capacity) or most, most)
