# Two commands: `make run` and `make test`. Each sets up .venv by itself.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
UV     := $(shell command -v uv 2>/dev/null)

# The oldest Spark that is supported: the Spark tests run on it too.
OLD_VENV  := .venv-spark40
OLD_STAMP := $(OLD_VENV)/.installed

# $(call install,folder,lock): make an environment with what the lock says, and this project in it.
NEW_PYTHON = $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("oncewire needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.11 and run again.")'
ifneq ($(UV),)
install = $(NEW_PYTHON) && echo "making $(1) with uv …" && \
	{ test -x $(1)/bin/python || $(UV) venv -q --python $(PYTHON) $(1); } && \
	$(UV) pip install -q --python $(1)/bin/python --require-hashes -r $(2) && \
	$(UV) pip install -q --python $(1)/bin/python --no-deps --no-build-isolation -e .
else
install = $(NEW_PYTHON) && echo "making $(1) with pip (some minutes the first time: Spark alone is 450 MB) …" && \
	{ test -x $(1)/bin/python || $(PYTHON) -m venv $(1); } && \
	$(1)/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r $(2) && \
	$(1)/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
endif

.DEFAULT_GOAL := help
.PHONY: help env run demo test test-spark40 check format size words mutants screenshots sanitize bench faults lock contracts reference advisories clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP) ## make .venv from requirements.lock (with uv when it is there, else pip)

# What is compiled is made anew when its source changes.
NATIVE := $(wildcard src/oncewire/_ground/native/*.[ch]) hatch_build.py

$(STAMP): requirements.lock pyproject.toml $(NATIVE)
	@$(call install,$(VENV),requirements.lock)
	@touch $@

$(OLD_STAMP): requirements-spark40.lock pyproject.toml $(NATIVE)
	@$(call install,$(OLD_VENV),requirements-spark40.lock)
	@touch $@

run: $(STAMP) ## start the whole system on this machine, with a small shop to watch (Ctrl-C stops it)
	@exec $(BIN)/oncewire up --pipeline --demo

test: $(STAMP) ## run every test that fits in a few minutes
	@$(BIN)/python -m pytest -p xdist -n 3 --dist loadfile --no-loadscope-reorder

test-spark40: $(OLD_STAMP) ## the Spark tests on Spark 4.0, in a .venv-spark40 of their own
	@$(OLD_VENV)/bin/python -m pytest tests/spark

check: $(STAMP) ## format, lint, types, import directions, rules tests: under a minute
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --config .importlinter --no-cache
	@$(BIN)/python -m pytest -q tests/rules

format: $(STAMP) ## let ruff rewrite what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

size: ## lines, settings, words, and what of it is there more than once
	@$(PYTHON) scripts/size.py

words: $(STAMP) ## phrases that users should not have to read: where they are, and what to write instead
	@$(BIN)/python scripts/words.py

mutants: $(STAMP) ## break the rules in small places and list what no test noticed (some minutes; SEED=, COUNT=)
	@$(BIN)/python scripts/mutants.py --seed $(or $(SEED),1) --count $(or $(COUNT),30)

bench: $(STAMP) ## the benchmarks, each beside its yardstick in one run
	@$(BIN)/python -m benchmarks

screenshots: $(STAMP) ## take the pictures of docs/images with headless chromium, of the console beside a busy shop
	@$(BIN)/python scripts/screenshots.py

demo: $(STAMP) ## a tour through every part, with a verdict at its end (about two minutes)
	@exec $(BIN)/oncewire demo

faults: $(STAMP) ## the long fault runs: kills, stops, clusters
	@$(BIN)/python -m pytest tests/faults tests/system tests/spark -m faults --timeout 3600

# Leaks are Python's own: it frees nothing when it ends.
sanitize: $(STAMP) ## the tests of the loops in C, compiled with the address and undefined-behaviour sanitizers
	@LDSHARED="cc -pthread -shared -g -fsanitize=address,undefined -fno-sanitize-recover" $(BIN)/python -c "import hatch_build, pathlib; hatch_build.compiled(pathlib.Path.cwd())"
	@LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python -m pytest -q tests/rules/test_native.py; status=$$?; \
		$(BIN)/python -c "import hatch_build, pathlib; hatch_build.compiled(pathlib.Path.cwd())" && exit $$status

contracts: $(STAMP) ## write the committed JSON Schemas and the AsyncAPI document anew
	@$(BIN)/oncewire contracts export --out docs/schemas
	@$(BIN)/oncewire topology export --out docs/asyncapi.json

reference: $(STAMP) ## write docs/reference and infra/scripts/create-outbox.sql from the code
	@$(BIN)/python scripts/reference.py

LOCK := uv pip compile -q --universal --generate-hashes --python-version 3.11 --all-extras --group dev --no-annotate

lock: ## write requirements.lock and requirements-spark40.lock anew (needs uv)
	@$(LOCK) pyproject.toml -o requirements.lock
	@$(LOCK) pyproject.toml -c tests/spark/spark40.txt -o requirements-spark40.lock

advisories: ## ask PyPI's advisory database about every pinned dependency (needs the network)
	@$(PYTHON) -m venv .venv-advisories && .venv-advisories/bin/python -m pip install -q --disable-pip-version-check pip-audit
	@.venv-advisories/bin/pip-audit -r requirements.lock --require-hashes --disable-pip --strict

clean: ## remove .venv and caches, never data
	rm -rf $(VENV) $(OLD_VENV) .venv-advisories .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
