"""One proposal followed from its making to the text.

    python -m scripts.labs.trace
    python -m scripts.labs.trace --follow 0
    python -m scripts.labs.trace --seed 1 --confidence 3,3,3

A request of a model whose laws are arguments, the same after every token, is decoded
under `Budget`. At each boundary that a proposal passes: what is stored of it, which
numbers are looked at, how old they are, and which event completes it. A generation is
the committed length that a proposal was made at.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from dspark_jax.decoding.batch import Batch, HostRound, Settings
from dspark_jax.decoding.extras import NOTHING
from dspark_jax.decoding.judging import Wanted, judge
from dspark_jax.decoding.plans import row_buckets
from dspark_jax.decoding.requests import Requests, pack_requests
from dspark_jax.decoding.state import FINISH_REASONS, RUNNING, DecodeState
from dspark_jax.decoding.words import round_words
from dspark_jax.model import Model
from dspark_jax.models import family
from dspark_jax.models.params import Tree
from dspark_jax.models.rows import packed_rows
from dspark_jax.scheduling import decide
from dspark_jax.scheduling.budget import curve
from dspark_jax.scheduling.cost_model import CostModel, CostTable
from dspark_jax.scheduling.memory import Memory
from dspark_jax.scheduling.policy import Budget
from dspark_jax.settings import SamplingParams
from dspark_jax.spec import Spec
from dspark_jax.tables import markdown_table
from dspark_jax.testing import scripted_model
from pallas_kernels import VerifiedRows
from scripts.labs.acceptance import Law, law_of

Show = Callable[[str], None]
CAPACITY = 128


@dataclasses.dataclass(frozen=True)
class Followed:
    """A proposal's way through one round.

    Attributes:
      before: the state that the proposal waits in.
      lengths: rows that the decision gives the request.
      total: rows of the round.
      target: int[lengths, V]. Integer row of the target behind each of them.
      verdict: on them.
      out: what the host received.
      after: the state with the next proposal.
    """

    before: DecodeState
    lengths: int
    total: int
    target: np.ndarray
    verdict: VerifiedRows
    out: HostRound
    after: DecodeState


def model_of(target: Law, draft: Law, confidence: Sequence[float], n: int) -> Model:
    """A target and a draft with one law each, whatever the token before."""
    with np.errstate(divide="ignore"):
        logs = [
            np.tile(np.log(np.asarray(law, np.float64)), (len(law), 1))
            for law in (target, draft)
        ]
    return scripted_model(*logs, gamma=n, confidence=np.asarray(confidence, np.float32))


def follow(model: Model, table: CostTable, seed: int, rounds: int) -> Followed:
    """Decodes `rounds` rounds, and then the one that verifies their last proposal."""
    n = model.spec.gamma
    words = np.asarray([[0, seed]], np.uint32)
    requests = pack_requests([SamplingParams(temperature=1.0)], words, ())
    settings = Settings("sampled", NOTHING, Budget(), table)
    batch = Batch(
        model.spec, model.params, model.programs, requests, 1, CAPACITY, n, settings
    )
    batch.start([[0]], [CAPACITY])
    for _ in range(rounds):
        batch.step()
    before = _copy(batch)
    assert before.memory is not None
    live = before.finish == RUNNING
    total, lengths = _decided(table, before.memory, live)
    size = int(lengths[0])
    target, verdict = _verified(
        model.params, before, requests, lengths, spec=model.spec, size=size
    )
    out = batch.step()
    return Followed(
        before, size, int(total), np.asarray(target), verdict, out, _copy(batch)
    )


@jax.jit
def _decided(
    table: CostTable, memory: Memory, live: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Rows of the round, and of each request."""
    total = decide.total_of(memory.older, table)
    return total, decide.lengths(Budget(), None, memory, live, True, total)


def _copy(batch: Batch) -> DecodeState:
    """The state, which the next round takes over, in arrays of its own."""
    assert batch.state is not None
    return jax.tree.map(jnp.copy, batch.state)


@functools.partial(jax.jit, static_argnames=("spec", "size"))
def _verified(
    params: Tree,
    state: DecodeState,
    requests: Requests,
    lengths: jax.Array,
    *,
    spec: Spec,
    size: int,
) -> tuple[jax.Array, VerifiedRows]:
    """The target's integer rows of a round, and verdicts, as `decode_round` does it."""
    proposal = state.proposal
    assert proposal is not None
    block = jnp.concatenate([state.anchor[:, None], proposal.ids], axis=1)
    rows = packed_rows(block, lengths, state.length, spec.width, size)
    logits, _, _ = family.target_of(spec.target).evaluate(
        spec.target, params["target"], state.target, state.capacity, rows
    )
    judged = judge(
        spec,
        params,
        cache=state.target,
        capacity=state.capacity,
        rows=rows,
        is_verify=rows.local_step < lengths[rows.request] - 1,
        proposal=proposal,
        requests=requests,
        words=round_words(requests.seeds, state.length + 1, spec.gamma),
        variant="sampled",
        wanted=Wanted(),
    )
    return pk.integer_rows(logits, requests.scale[rows.request]), judged.verdict


def report(found: Followed, followed: int, show: Show) -> None:
    """Shows every boundary."""
    before, after = found.before, found.after
    made, memory, following = before.proposal, before.memory, after.proposal
    assert made is not None and memory is not None and following is not None
    assert made.weights is not None and made.offset is not None
    generation, older = int(made.generation[0]), int(memory.older.generation[0])
    names = [chr(ord("A") + i) for i in range(made.weights.shape[2])]
    ids, verdict = made.ids[0].tolist(), found.verdict
    weights, offsets = np.asarray(made.weights[0]), np.asarray(made.offset[0])

    show(f"1. Made at the end of round {followed}: generation {generation}.")
    table = [
        [
            generation + j,
            names[token],
            _row(weights[j]),
            int(offsets[j]),
            f"{float(made.confidence[0, j]):g}",
            f"{float(memory.newest.values[0, j]):.4f}",
        ]
        for j, token in enumerate(ids)
    ]
    columns = ["position", "id", "stored row / 2^30", "offset", "logit", "survival"]
    show(markdown_table(columns, table))
    anchor = names[int(before.anchor[0])]
    event = "prefill" if followed == 0 else f"the program of round {followed}"
    show(f"The anchor is {anchor}; nothing of the proposal is committed.")
    show(f"Completed by: {event} ends, and the proposal lies in the state.\n")

    show(f"2. Scheduled: {found.lengths} of {found.total} rows.")
    if older == generation:
        show("The total is of no proposal: none was older, survivals count as 1.")
    else:
        values = [f"{v:.4f}" for v in memory.older.values[0].tolist()]
        show(f"The total is of generation {older}: survivals {', '.join(values)}.")
    show(f"Its division is of generation {int(memory.newest.generation[0])}, this one.")
    show(f"Completed by: round {followed + 1} is launched, and takes the state over.\n")

    show(f"3. Verified: {found.lengths - 1} drafts.")
    table = []
    for j in range(found.lengths):
        is_draft = j < found.lengths - 1
        p, q, at, stands = _row(found.target[j]), "-", "-", "fresh"
        if is_draft:
            p = f"{int(found.target[j, ids[j]])}"
            q, at = f"{int(weights[j, ids[j]])}", f"{int(offsets[j])}"
            stands = "stands" if bool(verdict.accept[j]) else "falls"
        token = names[int(verdict.token[j])] if stands != "stands" else "-"
        table.append(
            [
                generation + j,
                names[ids[j]] if is_draft else "-",
                q,
                at,
                p,
                stands,
                token,
            ]
        )
    columns = ["position", "draft", "q(draft)", "offset", "p(draft)", "verdict", "else"]
    show(markdown_table(columns, table))
    show("A draft stands where its offset is below p(draft).")
    show("Completed by: the target's rows are there; nothing is written yet.\n")

    emitted = found.out.emitted[0]
    show(f"4. Published: {' '.join(names[t] for t in emitted)}.")
    show(
        f"{found.out.kept[0]} of {found.out.drafted[0]} drafts stood; the request is "
        f"{FINISH_REASONS[found.out.finish[0]]}."
    )
    show(f"Committed tokens: {generation}, now {generation + len(emitted)}.")
    show("Completed by: keys and values of these rows are in the caches, the anchor is")
    show(f"{names[int(after.anchor[0])]}, and the host has received the tokens.\n")

    show(f"5. Replaced by the proposal of generation {int(following.generation[0])}:")
    show(f"{' '.join(names[t] for t in following.ids[0].tolist())}.")
    show("What was not verified of the old one is gone, its random words with it.")


def _row(weights: np.ndarray) -> str:
    return " ".join(str(int(w)) for w in weights)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _times(text: str) -> tuple[float, ...]:
    times = _numbers(text)
    if min(times) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: numbers > 0")
    return times


def main(arguments: Sequence[str] | None = None, show: Show = print) -> None:
    """Prints the boundaries."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    third = tuple(Fraction(k, 6) for k in (3, 2, 1))
    parser.add_argument("--target", type=law_of, default=third, help="1/2,1/3,1/6")
    draft = tuple(Fraction(k, 6) for k in (2, 3, 1))
    parser.add_argument("--draft", type=law_of, default=draft, help="1/3,1/2,1/6")
    parser.add_argument(
        "--confidence",
        type=_numbers,
        default=(1.0, 2.0, -1.0),
        help="logit of a draft's confidence, by the token before it",
    )
    parser.add_argument(
        "--ms",
        type=_times,
        default=(10.0, 12.0, 14.0),
        help="milliseconds of 2, 3, .. rows; one more than these are the drafts' rows",
    )
    parser.add_argument("--seed", type=int, choices=range(1000), default=0, metavar="N")
    parser.add_argument(
        "--follow",
        type=int,
        choices=range(20),
        default=1,
        metavar="R",
        help="round that makes the proposal; 0 is the prefill",
    )
    options = parser.parse_args(arguments)
    sizes = {len(x) for x in (options.target, options.draft, options.confidence)}
    if len(sizes) != 1:
        parser.error("--target, --draft and --confidence have different lengths")
    n = len(options.ms)
    model = model_of(options.target, options.draft, options.confidence, n)
    table = CostModel(curve(row_buckets(1, n), options.ms)).table(1)
    report(follow(model, table, options.seed, options.follow), options.follow, show)


if __name__ == "__main__":
    main()
