# Two commands: `make run` and `make test`. Each sets up .venv by itself.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
UV     := $(shell command -v uv 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help env run test check format bench faults lock contracts clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP) ## make .venv from requirements.lock (with uv when it is there, else pip)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("oncewire needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.11 and run again.")'
ifneq ($(UV),)
	@echo "making $(VENV) with uv …"
	@test -x $(BIN)/python || $(UV) venv -q --python $(PYTHON) $(VENV)
	@$(UV) pip install -q --python $(BIN)/python --require-hashes -r requirements.lock
	@$(UV) pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
else
	@echo "making $(VENV) with pip (some minutes the first time: Spark alone is 450 MB) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
endif
	@touch $@

run: $(STAMP) ## start the whole system on this machine (Ctrl-C stops it)
	@exec $(BIN)/oncewire up

test: $(STAMP) ## run every test that fits in a few minutes
	@$(BIN)/python -m pytest -p xdist -n 2 --dist loadfile

check: $(STAMP) ## format, lint, types, import directions, rules tests: under a minute
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --config .importlinter --no-cache
	@$(BIN)/python -m pytest -q tests/rules

format: $(STAMP) ## let ruff rewrite what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP) ## the benchmarks, each beside its yardstick in one run
	@$(BIN)/python -m benchmarks

faults: $(STAMP) ## the long fault runs: kills, stops, clusters
	@$(BIN)/python -m pytest tests/faults tests/system -m faults --timeout 3600

contracts: $(STAMP) ## write the committed JSON Schemas and the AsyncAPI document anew
	@$(BIN)/oncewire contracts export --out docs/schemas
	@$(BIN)/oncewire topology export --out docs/asyncapi.json

lock: ## write requirements.lock anew (needs uv)
	@uv pip compile -q --universal --generate-hashes --python-version 3.11 --all-extras --group dev --no-annotate pyproject.toml -o requirements.lock

clean: ## remove .venv and caches, never data
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
