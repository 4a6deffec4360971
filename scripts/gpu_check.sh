#!/usr/bin/env bash
# Checks and times the kernels on the NVIDIA GPU of this machine, in a few minutes.
# Nothing is installed: the Python given, or python3, must have jax >= 0.11.2 for
# CUDA. Results go to the folder OUT, or to runs/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${OUT:-runs}"
mkdir -p "$out"
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"${1:-python3}" scripts/gpu_check.py --json "$out/gpu_check.json" 2>&1 |
    tee "$out/gpu_check.log"
