# Every target sets up what it needs by itself (scripts/env tells how); a second run installs nothing.
#
#     make test ARGS="-k merge"           more options for pytest
#     make train PRESET=tiny ARGS="..."   more options for the training script
#     make test VENV=.venv-new JAX_VERSION=0.11.2 PYTHON=/usr/bin/python3.13

ARGS ?=
PRESET ?= tiny
WORKERS ?= auto
IMPLEMENTATION ?= triton
PYTEST = python3 -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal

.PHONY: help train test test-all test-slow test-gpu aot lint format wheel-check clean

help:
	@echo "make train        train the $(PRESET) language model"
	@echo "make test         the tests that any machine can run"
	@echo "make test-all     the same with JAX 0.11.2 and with 0.12.0.1"
	@echo "make test-slow    the slow tests"
	@echo "make test-gpu     the tests on an NVIDIA GPU, of IMPLEMENTATION=triton (or xla, reference)"
	@echo "make aot          compile all kernels for every GPU, with none: registers, spills, memory"
	@echo "make lint         ruff and mypy"
	@echo "make format       put the code into ruff's format"
	@echo "make wheel-check  sdist, wheel, clean environment, import and one call"
	@echo "make clean        remove environments, caches and builds"

train:
	scripts/env examples python3 examples/train_lm.py --preset $(PRESET) $(ARGS)

test:
	scripts/env test $(PYTEST) -m "not gpu and not slow" $(ARGS)

test-all: test-jax0.11.2 test-jax0.12.0.1

test-jax%:
	VENV=.venv-jax$* JAX_VERSION=$* scripts/env test $(PYTEST) -m "not gpu and not slow" $(ARGS)

test-slow:
	scripts/env dev $(PYTEST) -m "slow and not gpu" $(ARGS)

test-gpu:
	FLASHJAX_TEST_GPU=1 scripts/env test $(PYTEST) -m gpu --implementation $(IMPLEMENTATION) $(ARGS)

aot:
	scripts/env aot python3 -m scripts.aot $(ARGS)

lint:
	scripts/env dev python3 -m ruff check .
	scripts/env dev python3 -m ruff format --check .
	scripts/env dev python3 -m mypy

format:
	scripts/env dev python3 -m ruff check --fix .
	scripts/env dev python3 -m ruff format .

wheel-check:
	scripts/env dev scripts/wheel-check

clean:
	rm -rf .venv .venv-* build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
