# Everything a newcomer or CI needs. `make demo` and `make test` install what they need first; second runs start at once.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
BIN := .venv/bin
UV := .venv-tools/bin/uv
STAMP := .venv/.millrace-setup
CHOICE := .venv/.millrace-engine
LOCK_OF_cpu := requirements.lock
LOCK_OF_gpu := requirements-gpu.lock
# What was chosen last stays: `make demo` after `make setup ENGINE=gpu` runs on the GPU. It is said on the command line: a
# variable of that name in the environment is likely another's.
CHOSEN := $(or $(shell cat $(CHOICE) 2> /dev/null),cpu)
ENGINE := $(CHOSEN)
# SGLang has an environment of its own beside the other: its pins are not ours.
MAIN := $(if $(filter sglang,$(ENGINE)),$(CHOSEN),$(ENGINE))
LOCK := $(or $(LOCK_OF_$(MAIN)),$(error ENGINE is cpu, gpu or sglang, not "$(ENGINE)"))
SGLANG := .venv-sglang
SGLANG_STAMP := $(SGLANG)/.millrace-setup
SGLANG_LOCK := requirements-sglang$(if $(shell command -v nvidia-smi),-gpu).lock
N ?= 10000
JOBS ?= 3
# A file's tests stay together, for what they share, and the longest files come first: tests/support/order.py has the
# list, and the slowest tests at the end of a run say where it is out of date.
PYTEST := $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 20

# Without byte code every start of vLLM is a first start (94 s against 24 s).
unexport PYTHONDONTWRITEBYTECODE
export UV_PYTHON_DOWNLOADS := never

.PHONY: help setup test unit check format demo demo-short proofs chaos histories fuzz audit-changes conformance engines architectures bench gpu lock
.PHONY: clean anew

help: ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) $(if $(filter sglang,$(ENGINE)),$(SGLANG_STAMP)) ## install everything by the lock, hashes checked; ENGINE=gpu: vLLM for GPUs, in place of that for CPUs; ENGINE=sglang: SGLang too

# uv lives beside the environment: a sync removes from it whatever the lock does not name.
$(UV): requirements-tools.lock
	@command -v $(PYTHON) > /dev/null || { echo "no $(PYTHON) found: install Python 3.11, or make PYTHON=/path/to/it" >&2; exit 1; }
	@echo "setup, 1 of 4: the installer (seconds)"
	@$(PYTHON) -m venv .venv-tools
	@.venv-tools/bin/pip install -q --disable-pip-version-check --require-hashes -r requirements-tools.lock
	@touch $@

$(STAMP): $(UV) $(LOCK) pyproject.toml infra/machine/kafka.lock $(if $(filter $(CHOSEN),$(MAIN)),,anew)
	@rm -f $@
	@[ -x $(BIN)/python ] || $(UV) venv -q -p $(PYTHON) .venv
	@echo $(MAIN) > $(CHOICE)
	@echo "setup, 2 of 4: the packages of $(LOCK) (minutes; 8 GB of disk)"
	@$(UV) pip sync -q -p $(BIN)/python --require-hashes --compile-bytecode $(LOCK)
	@echo "setup, 3 of 4: Millrace itself (seconds)"
	@$(UV) pip install -q -p $(BIN)/python --no-deps --no-build-isolation -e .
	@# The type checker finds the package by its name through this link: the repository is the package.
	@mkdir -p .venv/package && ln -sfn ../.. .venv/package/millrace
	@echo "setup, 4 of 4: Kafka (a minute)"
	@$(BIN)/python -m millrace.infra.machine.jars > /dev/null
	@$(BIN)/python -m millrace.infra.machine.make_class_archive > /dev/null
	@touch $@

$(SGLANG_STAMP): $(UV) $(SGLANG_LOCK) pyproject.toml
	@rm -f $@
	@[ -x $(SGLANG)/bin/python ] || $(UV) venv -q -p $(PYTHON) $(SGLANG)
	@echo "setup of SGLang: the packages of $(SGLANG_LOCK), and Millrace among them (a minute; 1 GB of disk beside .venv)"
	@$(UV) pip sync -q -p $(SGLANG)/bin/python --require-hashes --compile-bytecode $(SGLANG_LOCK)
	@$(UV) pip install -q -p $(SGLANG)/bin/python --no-deps --no-build-isolation -e .
	@touch $@

check: setup ## formatting, lint, imports, types; prints the figures of every room
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	@# It looks for the package by name in the path, and finds it where the type checker does.
	PYTHONPATH=.venv/package $(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	@$(BIN)/python -m tests.support.house

format: setup ## format and fix what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

test: check $(SGLANG_STAMP) ## everything that CI runs, services included; JOBS= how many files at once
	$(PYTEST)

unit: setup ## the quick tests, which start no service, in about two minutes
	$(PYTEST) -m "not slow"

demo: setup ## the main job: train a tiny model through the whole loop, with kills on the way
	$(BIN)/millrace demo

demo-short: setup ## ten versions and one kill
	$(BIN)/millrace demo --short

proofs: histories fuzz audit-changes conformance engines chaos ## the long forms of all that `make test` runs in a short one; hours

chaos: setup ## every kill point, random kills, zombies, joins and leaves, frozen machines, power cuts, full disks; audits
	$(BIN)/python -m tests.chaos.elements
	$(BIN)/python -m tests.chaos

histories: setup ## random histories of the production stages in memory; N= how many
	MILLRACE_HISTORIES=$(N) $(BIN)/pytest tests/properties/test_histories.py

fuzz: setup ## random requests, replies and bytes against the gateway and the stages; N= how many (a million), SEED= which
	MILLRACE_FUZZ=$(if $(filter file,$(origin N)),1000000,$(N)) MILLRACE_FUZZ_SEED=$(SEED) $(BIN)/pytest -n $(JOBS) --dist load --timeout 0 -rP tests/fuzz

audit-changes: setup ## alter any field of any record of whole histories, count what the audit names; N= how many
	$(BIN)/python -m tests.consumers.audit.corruptions.tally $(or $(N),10000)

conformance: setup ## every sibling of every seam against its one suite, every case of every trainer backend
	MILLRACE_CONFORMANCE=all $(BIN)/pytest -k conformance

engines: setup $(SGLANG_STAMP) ## a reload killed at every point, a fleet under every fault, on real vLLM and SGLang
	MILLRACE_ENGINES=all $(BIN)/pytest $(addprefix tests/,$(addprefix consumers/reloader/test_,process.py process_broadcast.py interruption.py adapters.py) producers/gateway/calls)

architectures: setup ## every architecture of transformers, each way of training: docs/architectures.md anew
	$(BIN)/python -m benchmarks.architectures

bench: setup ## the figures of docs/benchmarks.md
	for name in $$(cd benchmarks && ls bench_*.py); do echo "== $$name"; $(BIN)/python -m benchmarks.$${name%.py}; done

gpu: setup ## training on one card, in under eight minutes: correctness, speed, profile, memory; tiny shapes on a CPU
	$(BIN)/python -m benchmarks.bench_gpu

# uv.lock holds addresses and is not kept; the two locks hold names, versions and hashes only. Both come from the same
# resolution: what trains is of one version, whatever samples.
EXPORT = $(UV) export -q -p $(PYTHON) --no-header --no-annotate --extra backends --extra tracking --group dev --no-emit-project --format requirements-txt

# SGLang's wheels are for machines of glibc 2.34 and later.
COMPILE = $(UV) pip compile -q --upgrade --no-header --no-annotate --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_34
SGLANG_PINS := infra/engines/sglang

lock: $(UV) ## resolve every dependency anew
	$(UV) lock -q -p $(PYTHON) --upgrade
	$(EXPORT) --extra engine-cpu -o $(LOCK_OF_cpu)
	$(EXPORT) --extra engine-gpu -o $(LOCK_OF_gpu)
	$(COMPILE) --override $(SGLANG_PINS)/cpu-overrides.txt $(SGLANG_PINS)/cpu.in -o requirements-sglang.lock
	$(COMPILE) $(SGLANG_PINS)/gpu.in -o requirements-sglang-gpu.lock
	@! grep -n '://' requirements*.lock || { echo "a lock must not name hosts" >&2; exit 1; }

clean: ## remove what the tools left; keeps the environment
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build ./*.egg-info
