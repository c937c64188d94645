# edgefl's commands. `make run` is the first thing to try; it needs Python 3.11 or newer and about 2 GB of disk.
# PYTHON=python3.12 picks another Python, VENV=... another place for the environment, PIP_FLAGS=... adds to pip.

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
BIN := $(VENV)/bin
METHODS := fedavg,fedasync,d-psgd,ad-psgd
KERNEL := setup.py $(wildcard edgefl/nodes/*.py edgefl/runtimes/*.py edgefl/runtimes/virtual/*.py)
COMPILED := $(wildcard edgefl/nodes/*.so edgefl/runtimes/*.so edgefl/runtimes/virtual/*.so)
# Once compiled, the kernel is compiled anew when its sources change: Python would go on with the old one.
FRESH := $(if $(COMPILED),$(VENV)/.compiled)

.PHONY: run test compile test-compiled test-slow test-containers lint types protos docs bench bench-peers clean help
.DEFAULT_GOAL := help

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1: /p' Makefile

run: $(VENV)/.installed-data,report $(FRESH)  ## compare four methods on the quickstart experiment
	$(BIN)/edgefl compare experiments/quickstart.toml --methods $(METHODS)

test: $(VENV)/.installed-test $(FRESH)  ## run the tests, but for slow ones and those that need containers
	$(BIN)/python -m pytest -n auto

test-slow: $(VENV)/.installed-test $(FRESH)  ## run the slow tests
	$(BIN)/python -m pytest -m slow

compile: $(VENV)/.compiled  ## compile the event kernel, for faster virtual time (needs a C compiler)

test-compiled: $(VENV)/.installed-test $(VENV)/.compiled  ## run the tests of the compiled kernel
	$(BIN)/python -m pytest -n auto tests/runtimes tests/conformance

test-containers: $(VENV)/.installed-test  ## run the tests that start containers (needs root)
	$(BIN)/python -m pytest -m containers

lint: $(VENV)/.installed-lint  ## check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-lint  ## check types
	$(BIN)/mypy

protos: $(VENV)/.installed-test  ## generate the protocol's code anew
	$(BIN)/python protos/generate.py

docs: $(VENV)/.installed-docs  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.installed-data,report $(VENV)/.compiled  ## run the benchmarks, each beside a plain alternative
	@set -e; for file in $(filter-out benchmarks/peers.py,$(wildcard benchmarks/*.py)); do \
		echo "== $$file"; $(BIN)/python "$$file"; done

bench-peers: $(VENV)/.installed-data,report $(VENV)/.compiled benchmarks/.peers/.installed  ## run the benchmark beside Flower
	$(BIN)/python benchmarks/peers.py

clean:  ## remove what was built and cached; runs and the environment stay
	rm -rf build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(COMPILED) edgefl_kernel__mypyc*.so $(VENV)/.compiled
	find edgefl tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment with an extra of pyproject.toml, installed anew when that file changes.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_FLAGS) --quiet --disable-pip-version-check -e '.[$*]'
	@touch $@

$(VENV)/.compiled: $(KERNEL) | $(VENV)/.installed-compile
	EDGEFL_COMPILE=1 $(BIN)/python setup.py --quiet build_ext --inplace --force
	@touch $@

# Flower, of which edgefl is measured beside: its requirements would narrow those of edgefl's own environment.
benchmarks/.peers/.installed:
	$(PYTHON) -m venv benchmarks/.peers
	benchmarks/.peers/bin/python -m pip install $(PIP_FLAGS) --quiet --disable-pip-version-check \
		'flwr[simulation]' torch
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "edgefl needs Python 3.11 or newer; $(PYTHON) is not: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.maxsize < 2**32)' || \
		{ echo "edgefl needs a 64-bit operating system: PyTorch has no builds for 32-bit ones" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
