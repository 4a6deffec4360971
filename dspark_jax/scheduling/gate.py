"""The online gate: how many drafts of one request to verify, learned as it decodes.

A table by bucket of the confidence logit holds how often drafts of that confidence
stood. From it and from the costs of a round follows the length with the most expected
tokens a millisecond.

There are two forms. The published one looks at the whole block before it decides. That
is right where tokens do not depend on what is verified: greedy rows, shared noise. For
drawn tokens it biases the text: confidence 2 knows token 1, so whether token 1 is
verified would depend on which token it is. `gate_decide_causal` asks for draft j with
confidences 1..j only, which are known before draft j is drawn, and is exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from dspark_jax.config import require
from dspark_jax.scheduling.gate_costs import GateCosts
from pallas_kernels.allocate import survival

# Rates that are equal on paper differ by rounding; a gain below this is none. Sixteen
# drafts lose at most 16 * 2^-24 of an expectation.
_TIE = 2.0**-19


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """How the gate learns and decides.

    Attributes:
      edges: increasing confidence logits between buckets; a logit on an edge belongs
        to the bucket above it.
      margin: factor by which a shorter length must beat the whole block. Expected
        tokens are products and costs are sums, so a low estimate cuts far more than
        a high one wastes.
      floor: never verify fewer drafts.
      decay: what a count is worth one round later.
      skip_pays_draft: a round that verifies nothing still paid for its drafts. False
        is the published form, which takes a plain step for free and skips too often.
    """

    edges: tuple[float, ...] = (-0.5, 0.5, 1.5, 3.0, 6.0)
    margin: float = 1.15
    floor: int = 0
    decay: float = 0.9
    skip_pays_draft: bool = True

    def __post_init__(self) -> None:
        edges = self.edges
        ok = isinstance(edges, tuple) and all(math.isfinite(e) for e in edges)
        ok = ok and all(a < b for a, b in zip(edges, edges[1:], strict=False))
        require(ok, "edges", edges, "a tuple of finite, strictly increasing logits")
        ok = math.isfinite(self.margin) and self.margin >= 1
        require(ok, "margin", self.margin, "a finite number >= 1")
        ok = isinstance(self.floor, int) and not isinstance(self.floor, bool)
        require(ok and self.floor >= 0, "floor", self.floor, "int >= 0")
        require(0 < self.decay <= 1, "decay", self.decay, "(0, 1]")
        ok = isinstance(self.skip_pays_draft, bool)
        require(ok, "skip_pays_draft", self.skip_pays_draft, "True or False")

    @property
    def buckets(self) -> int:
        """Buckets of confidence."""
        return len(self.edges) + 1


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["hits", "totals"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class GateState:
    """What the gate has seen, decayed; each request by itself.

    Attributes:
      hits: float32[B, buckets]. Drafts that stood.
      totals: float32[B, buckets]. Drafts whose outcome is known.
    """

    hits: jax.Array
    totals: jax.Array


def gate_start(config: GateConfig, batch: int) -> GateState:
    """A cold gate for `batch` requests; it verifies whole blocks."""
    require(batch >= 1, "batch", batch, ">= 1")
    shape = (batch, config.buckets)
    return GateState(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def gate_rates(config: GateConfig, state: GateState, logits: jax.Array) -> jax.Array:
    """Chance that each draft stands once those before it did.

    (hits + 1) / (totals + 1) of the draft's bucket: 1 where nothing is known, so that
    what is unknown gets tried.

    Args:
      config: see there.
      state: of the same requests.
      logits: float32[B, n]. Raw confidence logits; NaN is in the lowest bucket.

    Returns:
      float32[B, n] in (0, 1].
    """
    _require_rows("logits", logits, state.hits.shape[0])
    rate = (state.hits + 1.0) / (state.totals + 1.0)
    return jnp.take_along_axis(rate, _bucket(config, logits), axis=1)


def gate_mean_rate(state: GateState) -> jax.Array:
    """Chance that a draft of unknown confidence stands: float32[B], 1 when cold."""
    return (state.hits.sum(1) + 1.0) / (state.totals.sum(1) + 1.0)


def gate_speed(config: GateConfig, p: jax.Array, costs: GateCosts) -> jax.Array:
    """Expected tokens a millisecond when 0..n drafts are verified.

    (1 + sum over i <= m of p_1 .. p_i) / cost(m). A round always emits one token of
    the target's own.

    Args:
      config: see there.
      p: float32[B, n]. Chances; NaN counts as 0.
      costs: of up to n drafts.

    Returns:
      float32[B, n + 1].

    Raises:
      ValueError: costs of another number of drafts.
    """
    drafts = _require_rows("p", p)
    require(
        costs.verify_ms.shape == (drafts + 1,),
        "verify_ms",
        costs.verify_ms.shape,
        f"[{drafts + 1}], for 0..{drafts} drafts",
    )
    alive = survival(jnp.clip(jnp.nan_to_num(p), 0.0, 1.0))
    tokens = 1.0 + jnp.pad(jnp.cumsum(alive, axis=1), ((0, 0), (1, 0)))
    skipped = costs.plain_ms
    if config.skip_pays_draft:
        skipped = skipped + costs.draft_ms
    spent = (costs.draft_ms + costs.verify_ms).at[0].set(skipped)
    return tokens / spent[None, :]


def gate_decide(config: GateConfig, p: jax.Array, costs: GateCosts) -> jax.Array:
    """Drafts to verify, chosen with the whole block in view.

    The fastest length, the shortest of equal ones; where that is not the whole block
    and does not beat it by more than `margin`, the whole block.

    Only for rows whose text cannot depend on the choice (greedy, shared noise). With
    drawn tokens the law of the text changes; see the module.

    Args:
      config: see there.
      p: float32[B, n]. From `gate_rates`.
      costs: of up to n drafts.

    Returns:
      int32[B] in 0..n.

    Raises:
      ValueError: costs of another number of drafts.
    """
    speed = gate_speed(config, p, costs)
    drafts = p.shape[1]
    allowed = jnp.arange(drafts + 1) >= min(config.floor, drafts)
    speed = jnp.where(allowed[None, :], speed, 0.0)
    best = speed.max(1, keepdims=True)
    fastest = jnp.argmax(~_faster(best, speed), axis=1).astype(jnp.int32)
    wins = _faster(best[:, 0], config.margin * speed[:, -1])
    return jnp.where(wins, fastest, drafts)


def gate_decide_causal(
    config: GateConfig, p: jax.Array, costs: GateCosts, ahead: jax.Array
) -> jax.Array:
    """Drafts to verify, draft j being taken for what confidences 1..j say.

    Before draft j the confidences 1..j are real and the later ones, which would know
    token j, are replaced by the expectation `ahead`. The published rule is asked about
    this block, where lengths below j - 1 are gone: if it would stop at j - 1, that is
    the length. Otherwise draft j is in, whatever comes.

    So `length >= j` is a function of p_1..p_j and of what was known before the round,
    and drawn tokens keep their law, if no draw is used twice.

    Args:
      config: see there.
      p: float32[B, n]. From `gate_rates`.
      costs: of up to n drafts.
      ahead: float32[B]. Chance for drafts whose confidence may not be looked at: from
        `gate_mean_rate`, or any number that does not depend on this round's drafts.

    Returns:
      int32[B] in 0..n.

    Raises:
      ValueError: costs of another number of drafts, or another number of requests.
    """
    batch, drafts = p.shape[0], _require_rows("p", p)
    require(ahead.shape == (batch,), "ahead", ahead.shape, f"[{batch}]")
    if drafts == 0:
        return jnp.zeros(batch, jnp.int32)
    step = jnp.arange(drafts)
    # known[j, k]: confidence k may be seen by the decision about draft j.
    known = step[None, :] <= step[:, None]
    views = jnp.where(known[None], p[:, None, :], ahead[:, None, None])
    speed = gate_speed(config, views.reshape(batch * drafts, drafts), costs)
    speed = speed.reshape(batch, drafts, drafts + 1)

    # Row j decides about the draft of index j, that is, between j drafts and more.
    length = jnp.arange(drafts + 1)
    here = length[None, :] == step[:, None]
    longer = length[None, :] > step[:, None]
    stopped = jnp.where(here[None], speed, 0.0).max(2)
    onward = jnp.where(longer[None], speed, 0.0).max(2)
    stop = ~_faster(onward, stopped) & _faster(stopped, config.margin * speed[..., -1])
    stop &= (step >= config.floor)[None, :]
    first = jnp.argmax(stop, axis=1).astype(jnp.int32)
    return jnp.where(stop.any(1), first, drafts)


def gate_update(
    config: GateConfig,
    state: GateState,
    logits: jax.Array,
    verified: jax.Array,
    accepted: jax.Array,
    active: jax.Array,
) -> GateState:
    """The state after a round.

    All counts decay, also in a round that verified nothing: a gate that always skips
    would never try again. Then positions 0..min(accepted, verified - 1) are counted,
    those below `accepted` as hits. Behind the first miss nothing is known.

    Args:
      config: see there.
      state: before.
      logits: float32[B, n]. Those that the round's drafts had.
      verified: int32[B]. Drafts verified; 0 for a plain step.
      accepted: int32[B]. Drafts that stood, at most `verified`.
      active: bool[B]. False keeps a request's counts as they are.
    """
    drafts = _require_rows("logits", logits, state.hits.shape[0])
    step = jnp.arange(drafts)[None, :]
    known = step <= jnp.minimum(accepted, verified - 1)[:, None]
    hit = known & (step < accepted[:, None])
    bucket = jax.nn.one_hot(_bucket(config, logits), config.buckets, dtype=jnp.float32)

    def moved(old: jax.Array, counted: jax.Array) -> jax.Array:
        new = jnp.where(counted[..., None], bucket, 0.0).sum(1)
        return jnp.where(active[:, None], config.decay * old + new, old)

    return GateState(moved(state.hits, hit), moved(state.totals, known))


def margin_gate(top1_minus_top2: jax.Array, threshold: float | jax.Array) -> jax.Array:
    """Whether to draft at all, from the row that the last token was taken from.

    Where the target itself was in doubt, drafts rarely stand. This gate alone saves the
    time of drafting, and it sees no draft, so that it suits drawn tokens too.

    Args:
      top1_minus_top2: float32[B]. Distance of the two highest target logits.
      threshold: logits; 0 always drafts, 4 is the published suggestion.

    Returns:
      bool[B]. False where the distance is below the threshold.
    """
    return ~(top1_minus_top2 < threshold)


def threshold_lengths(confidence: jax.Array, threshold: float | jax.Array) -> jax.Array:
    """The longest prefix whose chance to stand as a whole is at least a threshold.

    Survival never rises along a block, so draft j is in for what confidences 1..j say:
    the rule suits drawn tokens.

    Args:
      confidence: float32[B, n]. Chances, given that the drafts before stand; NaN
        counts as 0.
      threshold: 0 verifies everything.

    Returns:
      int32[B] in 0..n.
    """
    _require_rows("confidence", confidence)
    alive = survival(jnp.clip(jnp.nan_to_num(confidence), 0.0, 1.0))
    return (alive >= threshold).sum(1).astype(jnp.int32)


def _bucket(config: GateConfig, logits: jax.Array) -> jax.Array:
    """int32[B, n]: how many edges are at or below each logit."""
    edges = jnp.asarray(config.edges, jnp.float32)[None, None, :]
    return (edges <= logits[..., None]).sum(-1).astype(jnp.int32)


def _faster(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a` is above `b` by more than rounding."""
    return a > b * (1.0 + _TIE)


def _require_rows(name: str, x: jax.Array, batch: int | None = None) -> int:
    rows = "B" if batch is None else batch
    ok = x.ndim == 2 and x.dtype == jnp.float32 and batch in (None, x.shape[0])
    found = f"{x.dtype}{list(x.shape)}"
    require(ok, name, found, f"float32[{rows}, n]")
    return x.shape[1]
