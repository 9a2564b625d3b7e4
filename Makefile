# Every target works on a fresh clone: what it needs is installed into .venv first.

# The Pythons to look for, the most tested first; `make setup PYTHON=/path/to/python` names one.
PYTHON ?= python3.11 python3.12 python3.13 python3.14 python3
PORT ?= 8000
# Further arguments for pytest: make test ARGS="-k leaderboard"
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/installed
TOOLS := .venv/tools

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup tools llama engines model demo check quick test image test-all chaos lint docs serve migrate up workers down clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## make .venv and install into it what measuring and serving need

tools: $(TOOLS) ## add what the tests and lint need

# With AMX llama.cpp's products end in a segmentation fault (llama-cpp-python 0.3.36): it is compiled without.
NO_AMX := $(if $(shell grep -m1 -o amx_tile /proc/cpuinfo 2>/dev/null),-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)

llama: tools ## add the llama_cpp backend: llama.cpp is compiled for this CPU, which takes several minutes
	@$(BIN)/python -c 'import gguf, llama_cpp' 2>/dev/null || \
	CFLAGS="$$CFLAGS $(NO_AMX)" CXXFLAGS="$$CXXFLAGS $(NO_AMX)" CMAKE_ARGS="-DGGML_NATIVE=ON" $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[llama]"

engines: tools ## add the backends onnxruntime and openvino, and the converter of coreml
	@$(BIN)/python -c 'import coremltools, nncf, onnx, onnxruntime, openvino' 2>/dev/null || \
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[onnxruntime,openvino,coreml]"

model: setup ## bring SmolLM2-135M into the models folder (93 MB), for the tests of a real model and the demo
	@exec $(BIN)/optigpu models get smollm2-135m

demo: setup ## measure GPT-2 through a ladder of optimizations on this machine, and show the result
	@exec $(BIN)/python -m examples.demo

check: tools ## what to run for each change: lint and the quick tests, on two cores
	@exec $(MAKE) --no-print-directory --output-sync=target -j2 lint quick

quick: tools
	@exec $(BIN)/python -m tests --quick -q $(ARGS)

test: tools ## run the tests but the long ones; PostgreSQL and Redis are found, started or installed
	@exec $(BIN)/python -m tests $(ARGS)

image: tools ## build the image and run what the compose files start, in a Docker of its own; root on Debian or Ubuntu
	@exec $(BIN)/python -m tests.docker $(ARGS)

test-all: llama engines ## all tests with the engines that pip installs, and the image; with ARGS=tests/edge those of a folder
	@exec $(BIN)/python -m tests --all $(ARGS)
	$(if $(ARGS),,@exec $(MAKE) --no-print-directory image)

chaos: tools ## 300 jobs while workers, APIs, Redis, PostgreSQL and the network fail; under 5 minutes
	@exec $(BIN)/python -m tests.chaos $(ARGS)

lint: tools ## check style, types, who imports whom, what is counted, and that migrations match the tables
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.code_counts --check
	$(BIN)/python -m tools.agent_lint
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	export OPTIGPU_DATABASE_URL="sqlite:///$$folder/check.db" && \
	$(BIN)/alembic upgrade head && $(BIN)/alembic check

docs: tools ## build the documentation's site into build/site; needs no network
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict --quiet

serve: setup ## run the service on PORT (8000) with a SQLite file and a worker inside
	@exec $(BIN)/python -m api --port $(PORT)

migrate: setup ## bring the database at OPTIGPU_DATABASE_URL (default: the SQLite file) up to date
	@exec $(BIN)/alembic upgrade head

# A worker for each GPU and MIG slice; GPU=UUID,UUID for those alone (beginnings are enough), GPU=none for no GPU.
GPU ?= all
# Without internet, or with an image that was loaded: BUILD="--no-build --pull never"
BUILD ?= --build
START = python3 -m tools.gpu_services --base $(1) --gpu "$(GPU)" && \
  REVISION=$$(git rev-parse HEAD 2>/dev/null) \
  docker compose --file $(1) --file docker-compose.gpus.yml up $(BUILD) --detach --remove-orphans

up: docker .env ## start PostgreSQL, Redis, the API and a worker for each GPU with Docker; GPU=UUID for one GPU
	@$(call START,docker-compose.yml)
	@docker compose --file docker-compose.yml port api 8000 | sed 's|^|OptiGPU listens on http://|'

workers: docker ## start workers alone with Docker, for a service on another host; .env names its PostgreSQL and Redis
	@[ -f .env ] || { echo "make workers reads .env: cp .env.worker.example .env, and put the addresses of" \
	  "PostgreSQL and Redis in it." >&2; exit 1; }
	@$(call START,docker-compose.worker.yml)

# By the project's name alone, so that it ends what either of them started.
down: ## stop what `make up` or `make workers` started; the data stays in its volumes
	docker compose --project-name optigpu down --remove-orphans

.PHONY: docker
docker:
	@docker compose version >/dev/null 2>&1 || { echo "make $(MAKECMDGOALS) needs Docker with its compose plugin:" \
	  "install both, or use make serve, which needs neither." >&2; exit 1; }
	@docker info >/dev/null 2>&1 || { echo "Docker does not answer: start it (systemctl start docker)," \
	  "or let this user use it (usermod -aG docker $$(id -un), then log in again)." >&2; exit 1; }
	@command -v python3 >/dev/null || { echo "make $(MAKECMDGOALS) needs python3 to list the GPUs: install it." >&2; exit 1; }

clean: ## remove caches and build outputs; .venv, .env and the data stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .schemathesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

$(INSTALLED): EXTRAS := service
$(TOOLS): EXTRAS := service,dev
$(TOOLS): $(INSTALLED)

# Each holds the checksum of what was installed: newer files with the same content install nothing.
$(INSTALLED) $(TOOLS): $(BIN)/python FORCE
	@sum=$$(cat pyproject.toml constraints.txt | cksum); \
	[ "$$sum" = "$$(cat $@ 2>/dev/null)" ] && exit 0; \
	echo "Installing the pinned dependencies ($(EXTRAS)) into .venv; this takes a few minutes the first time."; \
	before=$$(du -sm .venv | cut -f1) && \
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]" && \
	echo "Installed $$(($$(du -sm .venv | cut -f1) - before)) MB into .venv." && \
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

.env: ## write .env with new random secrets
	@umask 077 && sed \
	  -e "s/^POSTGRES_PASSWORD=.*/POSTGRES_PASSWORD=$$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')/" \
	  -e "s/^OPTIGPU_API_KEY=.*/OPTIGPU_API_KEY=$$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')/" \
	  .env.example > $@
	@echo "Wrote .env with new random secrets; the API key is OPTIGPU_API_KEY in it."
