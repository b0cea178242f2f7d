# The one entry point for people and CI. Each target works from a fresh clone: it makes its own environment in .venv.
MAKEFLAGS += --no-print-directory
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
STORE ?= postgres
BROKER ?= kafka
SECONDS ?= 60
BASE ?= HEAD
# Bytecode is compiled once, not by each process of the tests, and stays out of the source tree.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/bytecode

CORES := $(shell nproc)
# Each file on one worker, which starts the servers that it needs. In the order of tests/conftest.py: the longest first.
DIST := --dist loadfile --no-loadscope-reorder

QUICK := tests/unit tests/docs tests/proof/test_checker.py tests/proof/test_random_histories.py
# For `matrix`, `lowest` and `coverage`: the quick suite and every other test that needs no server but these.
# --servers skips the rest. The proof, the examples and the tests of the servers are left out: they repeat on more
# databases what these tests cover.
SERVERS := postgres,kafka
SELECTION = $(QUICK) tests/conformance tests/drivers tests/django_app tests/integration \
	--servers=$(SERVERS) -m 'not long' -n $(CORES) $(DIST) -q -rfE

.PHONY: help env demo example test quick check format docs servers available matrix lowest coverage bench compare \
	figures prove consumers long lock build clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env:
	@tools/env

demo: ## watch it work on SQLite; needs Python only
	@tools/env check
	@PYTHONPATH=src $${PYTHON:-python3} -m pillarbox demo

example: env ## run an example on real servers, which it starts itself (NAME=wiki)
	@$(PY) -m tests.examples $(NAME)

test: env available ## run the whole suite on real servers, which it starts itself
	@$(PYTEST) -n 4 $(DIST) -m 'not long'

quick: env ## run the tests that need no servers; takes about a minute
	@$(PYTEST) -n 2 $(QUICK) -k "not TestOnServers" -m "not long"

check: env ## check format, lint, types, import layers and docs
	@.venv/bin/ruff format --check .
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@$(PY) -m sphinx --quiet --fail-on-warning --keep-going --nitpicky docs build/docs

format: env ## format the code and fix what the linter can fix
	@.venv/bin/ruff check --fix --quiet .
	@.venv/bin/ruff format .

docs: env ## build the documentation into build/docs
	@$(PY) -m sphinx --fail-on-warning docs build/docs

servers: env ## download every server that the tests use; as root, install Debian packages too
	@$(PY) -m servers fetch

# A contributor may lack a server, whose tests are then skipped. CI may not.
available: env
	@$(PY) -m servers fetch || [ "$$CI" != true ]

matrix: env ## test on each installed Python from 3.11 on, with SQLite, PostgreSQL and Kafka (VERSIONS="3.12 3.13")
	@$(PY) tools/matrix.py $(VERSIONS) -- $(SELECTION)

lowest: env ## the same tests with the lowest allowed versions of the dependencies, on Python 3.11
	@$(PY) tools/matrix.py --lowest -- $(SELECTION)

coverage: env ## the same tests with coverage; lists the files with the least (SERVERS=postgres,kafka,mysql,mongo)
	@$(PY) -m coverage erase
	@$(PY) -m coverage run -m pytest $(SELECTION); code=$$?; \
	$(PY) -m coverage combine --quiet && $(PY) -m coverage report && $(PY) -m coverage html --quiet; exit $$code

bench: env servers ## measure us, a bare script and peers in a quarter of an hour, into build/bench.json (ARGS=--all for every row)
	@$(PY) -m benchmarks $(ARGS)

compare: env ## measure this tree against another commit, in turn (BASE=HEAD ROWS="postgres-kafka add" ROUNDS=7)
	@$(PY) -m benchmarks.compare $(BASE) $(if $(ROWS),--only $(ROWS)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(ARGS)

figures: env ## put the tables and plots of a benchmark into the documentation (FILE=build/bench.json)
	@$(PY) -m benchmarks.plots $(FILE)

prove: env servers ## break servers and relays for a while and check every event (STORE= BROKER= SECONDS= SEED= ARGS=)
	@$(PY) -m proof run --store $(STORE) --broker $(BROKER) --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

consumers: env servers ## the same for consumers (STORE=postgres or mongo, BROKER=kafka, pulsar or rabbitmq, SECONDS= SEED= ARGS=)
	@$(PY) -m proof consumers --store $(STORE) --broker $(BROKER) --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

long: env available ## run the tests that take minutes: three MongoDB nodes, the proxy, rarely used servers
	@$(PYTEST) -n 2 $(DIST) -m long

lock: env ## resolve the locked versions again (ARGS=--upgrade)
	@tools/lock $(ARGS)

build: env ## build the wheel and the sdist into dist/
	@$(PY) -m build --no-isolation --outdir dist

clean: ## remove the environments and everything that was built; the download cache stays
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

.DEFAULT:
	@echo "pillarbox: there is no target '$@'; these are:" >&2; $(MAKE) help >&2; exit 2
