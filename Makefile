# The whole project in a few targets. `make` alone lists them.
#
# PYTHON   the interpreter that makes .venv (3.11 or later)
# CONFIG   what `make serve` runs
# ARGS     passed on: make test ARGS="-k metrics", make bench ARGS="--quick"
# pip reads its own environment: on a machine without a GPU, point PIP_EXTRA_INDEX_URL at an index of CPU builds of torch.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
CONFIG ?= deployments/dspark_cpu.yaml
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGES := drafter cluster deployments

.PHONY: help setup serve test check bench observe generate

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install what constraints.txt names (quick when nothing changed)

serve: $(STAMP) ## fetch the model, then serve CONFIG on 127.0.0.1:8000; prints the URL and a curl line when it is ready
	@$(BIN)/python -m ops.serve $(CONFIG) $(ARGS)

# Tiny models gain nothing from a second thread, and threads that wait for one whose core is taken lose ten times as much.
test: export OMP_NUM_THREADS ?= 1
test: $(STAMP) ## run every test
	@$(BIN)/python -m pytest $(ARGS)

check: $(STAMP) ## lint, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(STAMP) ## plain, fixed and scheduled decoding, side by side in one run (ARGS="--quick": under a minute)
	@$(BIN)/python -m ops.benchmarks.speedup $(ARGS)

observe: $(STAMP) ## scrape the running server with a local Prometheus, these rules loaded; prints where to look
	@$(BIN)/python -m ops.observe $(ARGS)

generate: $(STAMP) ## write again what is made from code: pages of metrics and settings, rules, dashboards, the chart's schema
	@$(BIN)/python -m ops.metrics_reference > docs/metrics.md
	@$(BIN)/python -m ops.settings_reference > docs/settings.md
	@$(BIN)/python -m ops.slo > ops/slo.md
	@$(BIN)/python -m ops.rules
	@$(BIN)/python -m ops.dashboards
	@$(BIN)/python -m ops.chart

# torch goes first and alone, pinned exactly: a resolver may take a newer release, and its CUDA build where only one CPU build is at hand.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or later is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
