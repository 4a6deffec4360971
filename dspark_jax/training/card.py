"""The model card of a trained draft, from the run's own records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark_jax.config_draft import DraftConfig
from dspark_jax.models.draft.backbone import decoder_of
from dspark_jax.training.settings import TrainConfig


def model_card(
    draft: DraftConfig,
    config: TrainConfig,
    facts: dict[str, Any],
    figures: dict[str, Any],
    lines: Sequence[dict[str, Any]],
) -> str:
    """Markdown.

    Args:
      draft: the draft.
      config: the run's settings.
      facts: target, machine, versions, sequences, answer_tokens, coverage, bytes,
        stored, and based, whether it goes on from another draft.
      figures: of the exported weights, `HeldOut.to_json`.
      lines: the run's metrics.
    """
    backbone = decoder_of(draft)
    geometry = backbone.attention("full")
    last = max((line["step"] for line in lines), default=0)
    anchors = last * config.sequences * config.anchors
    hours = _hours(lines)
    head = (
        f"{draft.markov_head}, rank {draft.markov_rank}"
        if draft.markov_rank
        else "none"
    )
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
    machine = facts["machine"]
    return "\n".join(
        [
            f"# A DSpark draft for {facts['target']}",
            "",
            "| | |",
            "|---|---|",
            f"| layers | {backbone.num_layers}, hidden size {backbone.hidden_size}, "
            f"{backbone.num_heads} heads, {geometry.num_kv_heads} key/value heads of "
            f"{geometry.head_dim} |",
            f"| drafts a round | {_rounds(draft)} |",
            f"| target layers read | {', '.join(map(str, draft.target_layer_ids))} |",
            f"| Markov head | {head} |",
            f"| confidence head | {'yes' if draft.confidence else 'no'} |",
            f"| vocabulary | {draft.head_rows} ids, which cover "
            f"{facts['coverage']:.1%} of the held-out tokens the target wrote |",
            f"| mask token | id {draft.mask_token_id} |",
            f"| stored as | {facts['stored']}, {facts['bytes'] / 1e6:.1f} MB |",
            "",
            "Embedding and output head are the target's and are not stored.",
            "",
            "## Training",
            "",
            "| | |",
            "|---|---|",
            f"| text | {facts['sequences']} sequences written by the target, "
            f"{facts['answer_tokens']} answer tokens |",
            f"| steps | {last} of {config.steps}, {config.sequences} sequences x "
            f"{config.anchors} anchors each: {anchors} anchors, "
            f"{anchors / max(facts['answer_tokens'], 1):.2f} passes |",
            f"| time | {hours:.1f} hours of steps on {machine['device']}, "
            f"{machine['cores']} cores |",
            f"| loss | {_loss(config)} |",
            f"| supervision | {_supervision(config)} |",
            f"| optimiser | {_optimiser(config)} |",
            f"| start | {'a trained draft' if facts['based'] else _start(config)} |",
            f"| seed | {config.seed} |",
            f"| versions | {versions} |",
            "",
            "## Held-out text",
            "",
            "Teacher-forced on sequences that were not trained on, but whose prompts "
            "are of the same kinds: `dspark-jax eval` measures what counts.",
            "",
            "| | |",
            "|---|---|",
            *_figures(figures),
            "",
            "## Progress",
            "",
            "| step | accepted length, greedy | at temperature 1 |",
            "|---|---|---|",
            *(
                f"| {line['step']} | {_number(line['held_out']['greedy_length'])} "
                f"| {_number(line['held_out']['expected_length'])} |"
                for line in lines
                if "held_out" in line
            ),
            "",
        ]
    )


def _rounds(draft: DraftConfig) -> str:
    if draft.usual_length is None:
        return str(draft.gamma)
    return f"{draft.usual_length} unless asked otherwise, at most {draft.gamma}"


def _hours(lines: Sequence[dict[str, Any]]) -> float:
    """Time of all steps, from the rates that were logged."""
    total, before = 0.0, 0
    for line in lines:
        if "seconds_a_step" in line:
            total += line["seconds_a_step"] * (line["step"] - before)
            before = line["step"]
    return total / 3600


def _figures(figures: dict[str, Any]) -> list[str]:
    error = figures["confidence_error"]
    return [
        f"| accepted length, greedy, bonus included | "
        f"{_number(figures['greedy_length'])} |",
        f"| conditional acceptance by position, greedy | "
        f"{_listed(figures['greedy_conditional'])} |",
        f"| expected accepted length at temperature 1 | "
        f"{_number(figures['expected_length'])} |",
        f"| sum of min(p, q) by position | {_listed(figures['acceptance'])} |",
        f"| mean absolute error of the confidence | {_number(error)} |",
    ]


def _loss(config: TrainConfig) -> str:
    loss = config.loss
    ce = f"{loss.ce:g}"
    if config.ce_steps:
        ce = f"{config.ce_start:g} falling to {loss.ce:g} over {config.ce_steps} steps"
    detached = ", detached" if loss.detach_confidence else ""
    return (
        f"cross-entropy (weight {ce}), L1 ({loss.l1:g}), confidence "
        f"({loss.confidence:g}{detached}); rows decay as exp(-j/{loss.decay:g})"
    )


def _supervision(config: TrainConfig) -> str:
    law = (
        f"the target's {config.top} likeliest tokens, the rest counting as missing"
        if config.top
        else "the target's whole law"
    )
    label = "that law" if config.soft_labels else "the token drawn from it"
    return f"{law}; cross-entropy against {label}"


def _optimiser(config: TrainConfig) -> str:
    return (
        f"Adam (beta2 {config.beta2:g}), peak rate {config.rate:g}, warm-up "
        f"{config.warmup} steps, {_schedule(config)}, clip {config.clip:g}, running "
        f"average {config.average:g}"
    )


def _schedule(config: TrainConfig) -> str:
    if config.schedule == "cosine":
        return "cosine to 0"
    return f"constant, then linear to 0 over the last {config.cooldown} steps"


def _start(config: TrainConfig) -> str:
    layers = "layers from the target's last" if config.start == "target" else "random"
    if config.bigram_steps:
        return f"{layers}, Markov head from {config.bigram_steps} steps on bigrams"
    return layers


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{x:.3f}" for x in values) or "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
