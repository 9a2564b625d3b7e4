# Every target works on a fresh clone: what it needs is installed into .venv first.

# The Pythons to look for, the most tested first; `make setup PYTHON=/path/to/python` names one.
PYTHON ?= python3.11 python3.12 python3.13 python3.14 python3
PORT ?= 8000
# Further arguments for pytest: make test ARGS="-k leaderboard"
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup llama demo check quick test lint serve migrate up down clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## make .venv and install the pinned dependencies into it

llama: setup ## add the llama_cpp backend: llama.cpp is compiled for this CPU, which takes several minutes
	@$(BIN)/python -c 'import gguf, llama_cpp' 2>/dev/null || \
	CMAKE_ARGS="-DGGML_NATIVE=ON" $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[llama]"

demo: setup ## measure GPT-2 through a ladder of optimizations on this machine, and show the result
	@exec $(BIN)/python -m examples.demo

check: setup ## what to run for each change: lint and the quick tests, on two cores
	@exec $(MAKE) --no-print-directory --output-sync=target -j2 lint quick

quick: setup
	@exec $(BIN)/python -m tests --quick -q $(ARGS)

test: setup ## run the tests; PostgreSQL and Redis are found, started or installed
	@exec $(BIN)/python -m tests $(ARGS)

lint: setup ## check style, types, who imports whom, what is counted, and that migrations match the tables
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.code_counts --check
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	export OPTIGPU_DATABASE_URL="sqlite:///$$folder/check.db" && \
	$(BIN)/alembic upgrade head && $(BIN)/alembic check

serve: setup ## run the service on PORT (8000) with a SQLite file and a worker inside
	@exec $(BIN)/python -m api --port $(PORT)

migrate: setup ## bring the database at OPTIGPU_DATABASE_URL (default: the SQLite file) up to date
	@exec $(BIN)/alembic upgrade head

# Without an NVIDIA driver Docker refuses to start the GPU worker, so it is left out there.
up: .env ## start PostgreSQL, Redis, the API and the workers with Docker
	@docker compose version >/dev/null 2>&1 || { \
	  echo "make up needs Docker with its compose plugin: install both, or use make serve, which needs neither." >&2; exit 1; }
	@workers=; nvidia-smi -L >/dev/null 2>&1 || { workers="--scale worker=0"; \
	  echo "No NVIDIA GPU found: starting without the GPU worker."; }; \
	REVISION=$$(git rev-parse HEAD 2>/dev/null) docker compose up --build --detach $$workers
	@docker compose port api 8000 | sed 's|^|OptiGPU listens on http://|'

down: ## stop what `make up` started; the data stays in its volumes
	docker compose down

clean: ## remove caches and build outputs; .venv, .env and the data stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .schemathesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

# It holds the checksum of what was installed: newer files with the same content install nothing.
$(INSTALLED): $(BIN)/python FORCE
	@sum=$$(cat pyproject.toml constraints.txt | cksum); \
	[ "$$sum" = "$$(cat $@ 2>/dev/null)" ] && exit 0; \
	echo "Installing the pinned dependencies into .venv; this takes a few minutes the first time."; \
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[service,dev]" && \
	echo "$$sum" > $@

$(BIN)/python:
	@found=; for python in $(PYTHON); do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && found=$$python && break; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "OptiGPU needs Python 3.11 or newer: install it, or name it: make setup PYTHON=/path/to/python" >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$found cannot make a virtual environment: install its venv module" \
	    "(Debian and Ubuntu: apt-get install python3-venv)." >&2; exit 1; \
	fi; \
	"$$found" -m venv --clear .venv

.PHONY: FORCE
FORCE:

.env:
	@umask 077 && sed \
	  -e "s/^POSTGRES_PASSWORD=.*/POSTGRES_PASSWORD=$$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')/" \
	  -e "s/^OPTIGPU_API_KEY=.*/OPTIGPU_API_KEY=$$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')/" \
	  .env.example > $@
	@echo "Wrote .env with new random secrets; the API key is OPTIGPU_API_KEY in it."
