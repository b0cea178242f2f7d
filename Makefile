# The one entry for people and CI. Each target works from a fresh clone: it makes its own environment in .venv.
MAKEFLAGS += --no-print-directory
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
STORE ?= postgres
BROKER ?= kafka
SECONDS ?= 60
# Compiled once and not by each process of the tests, and out of the tree.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/bytecode

.PHONY: help env demo example test quick check format docs servers bench figures prove long lock build clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env:
	@tools/env

demo: ## see it work on SQLite, with nothing else installed
	@tools/env check
	@PYTHONPATH=src $${PYTHON:-python3} -m pillarbox demo

example: env ## run an example against real servers, which it brings itself (NAME=wiki)
	@$(PY) -m tests.examples $(NAME)

test: env servers ## the whole suite against real servers, which it brings itself
	@$(PYTEST) -n 4 --dist loadfile -m 'not long'

quick: env ## what runs in under a minute without servers
	@$(PYTEST) -n 2 tests/unit tests/docs tests/proof/test_checker.py tests/proof/test_random_histories.py -k "not TestOnServers" -m "not long"

check: env ## format, lint, types, import layers, docs
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@$(PY) -m sphinx --quiet --fail-on-warning --keep-going --nitpicky docs build/docs

format: env ## format and mend what the linter can
	@.venv/bin/ruff check --fix --quiet .
	@.venv/bin/ruff format .

docs: env ## build the documentation into build/docs
	@$(PY) -m sphinx --fail-on-warning docs build/docs

servers: env ## fetch every server that the tests use
	@$(PY) -m tests.servers fetch

bench: env servers ## floor, ours, peers and ratios in ten minutes, into build/bench.json (ARGS=--all for all of it)
	@$(PY) -m benchmarks $(ARGS)

figures: env ## put the tables and plots of a benchmark into the documentation (FILE=build/bench.json)
	@$(PY) -m benchmarks.plots $(FILE)

prove: env servers ## break everything for a while and check each event (STORE= BROKER= SECONDS= SEED= ARGS=)
	@$(PY) -m proof run --store $(STORE) --broker $(BROKER) --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

long: env servers ## tests that take minutes: three nodes of MongoDB, the proxy, servers that nothing needs yet
	@$(PYTEST) -n 2 --dist loadfile -m long

lock: env ## resolve the locked versions anew (ARGS=--upgrade)
	@tools/lock $(ARGS)

build: env ## wheel and sdist into dist/
	@$(PY) -m build --no-isolation --outdir dist

clean: ## remove the environment and all that was built; the download cache stays
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

.DEFAULT:
	@echo "pillarbox: there is no target '$@'; these are:" >&2; $(MAKE) help >&2; exit 2
