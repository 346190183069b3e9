# make train   sets up .venv and trains configs/tiny_cpu.gin
# make test    sets up .venv and runs the tests
# make test-long  the sweeps and slow checks that make test leaves out
# make lint    ruff and mypy
# make bench   the benchmarks of scripts/
# make sim     simulates configs/sim/paper_1f3s.gin
# make compile-check      compiles the training step for TPUs that are not here, and checks it
# make compile-check-gpu  the same for GPUs (downloads the CUDA compiler, 4 GB)
#
# ARGS go to the command: make train ARGS="--set TrainConfig.steps=20"

# The first Python that is 3.11 or 3.12; say PYTHON=... for another place.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
CONFIG ?= configs/tiny_cpu.gin
BIN := .venv/bin
# In a terminal pip shows what it does, with a bar for each download.
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(shell test -t 2 || echo --quiet)
# A worker a core, each with up to 4 GB; all tests of a file run in one.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Compiled programs are kept between runs.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax

.PHONY: train test test-long lint bench sim compile-check compile-check-gpu setup setup-dev clean

train: setup
	$(BIN)/python train.py --config $(CONFIG) $(ARGS)

test: setup-dev
	$(PYTEST) -m "not long" $(ARGS)

test-long: setup-dev
	$(PYTEST) -m long $(ARGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.installed-exact
	$(BIN)/python scripts/bench_attention.py $(ARGS)
	$(BIN)/python scripts/bench_exchange.py $(ARGS)
	$(BIN)/python scripts/bench_step.py $(ARGS)
	$(BIN)/python scripts/bench_planner.py $(ARGS)

sim: setup
	$(BIN)/repack-simulate --config configs/sim/paper_1f3s.gin $(ARGS)

compile-check: .venv/.installed-tpu
	$(BIN)/python scripts/compile_check.py --config configs/tiny_cpu.gin --topology v5p:2x2x4 $(ARGS)
	$(BIN)/python scripts/compile_check.py --config configs/moe_1f3s_31b.gin --topology v5p:2x4x4 $(ARGS)

compile-check-gpu: .venv/.installed-gpu
	$(BIN)/python scripts/compile_check.py --config configs/tiny_cpu.gin --topology h100:2x8 $(ARGS)
	$(BIN)/python scripts/compile_check.py --config configs/moe_1f3s_31b.gin --topology h200:4x8 $(ARGS)

setup: .venv/.installed
setup-dev: .venv/.installed-dev

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or 3.12 found; say PYTHON=/path/to/python3.12"; exit 2; }
	@echo "making .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv

# The checkout itself is installed as editable: scripts, tests and examples import it without path edits.
.venv/.installed: requirements.txt pyproject.toml | .venv/bin/python
	@echo "installing JAX and the rest of requirements.txt into .venv: downloads of about 250 MB, 1 GB on the disk;"
	@echo "  typically 1 to 3 minutes, once"
	@$(PIP) -r requirements.txt
	@$(PIP) --no-deps --editable .
	@touch $@

.venv/.installed-%: requirements-%.txt .venv/.installed
	@echo "installing $< into .venv"
	@$(PIP) -r requirements.txt -r $<
	@touch $@

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache .mypy_cache build *.egg-info
