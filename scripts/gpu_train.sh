#!/usr/bin/env bash
# The draft of the default model on an accelerator, from nothing to figures: text from
# the target, training, calibration, evaluation. Every step goes on where it was stopped.
#
#   scripts/gpu_train.sh OUT               with `dspark-jax` on the path
#   SEQUENCES=... STEPS=... MINUTES=... RECIPE=... MODEL=... scripts/gpu_train.sh OUT
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:?usage: scripts/gpu_train.sh OUT}
model=${MODEL:-smollm2-135m}
recipe=${RECIPE:-recipes/smollm2-135m/gpu.toml}
mkdir -p "$out"

dspark-jax data --model "$model" --prompts builtin --invent 0.45 --seed 7 \
    --sequences "${SEQUENCES:-40000}" --length "${LENGTH:-256}" \
    --batch "${BATCH:-512}" --shard "${SHARD:-2048}" --out "$out/text"

# Recomputing what the target says is cheaper here than storing it.
dspark-jax train --model "$model" --data "$out/text" --recipe "$recipe" \
    --run "$out/run" --features-gb 0 --minutes "${MINUTES:-6}" --export --int8 \
    ${STEPS:+--steps "$STEPS"} ${HELD_OUT:+--held-out "$HELD_OUT"} --out "$out/draft"

dspark-jax eval --model "$model" --draft "$out/draft" ${LIMIT:+--limit "$LIMIT"} \
    --max-new-tokens "${TOKENS:-256}" --output "$out/eval.json"
