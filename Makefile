SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Bytecode is kept even where the environment says otherwise: without it, every process compiles the project again.
unexport PYTHONDONTWRITEBYTECODE
DATABASE_TESTS := $(addprefix tests/, datasets devices inference jobs memory_profiles models/test_trained_models.py observability planning/test_calculators.py \
	profiling/test_previews.py regressions results security statistics storage submissions sweeps usage web webhooks workers)

TOOLS := trl==1.16.0 datasets dill multiprocess pandas python-dateutil xxhash axolotl==0.19.0 addict llamafactory==0.9.5 \
	fire termcolor torchtune==0.6.1 torchao==0.9.0 omegaconf antlr4-python3-runtime==4.9.3 sentencepiece tiktoken blobfile \
	lxml pycryptodomex nemo-automodel==0.7.0 torchdata kubeflow-trainer-api==2.3.0 kubernetes-validate==1.37.0 \
	importlib_resources jsonschema jsonschema_specifications referencing rpds_py attrs
.PHONY: help setup demo test test-all test-rest test-slow test-trl test-tools test-faults test-executors test-object-storage test-gpu test-fuzz test-browser test-images soak accuracy bench-trainer bench-queue bench-api bench-fleet bench-dashboard bench-memory bench-variance bench-devices bench-data bench-durations bench-inference families serve check format migrate clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make .venv, which holds the accrue command
	@echo "Ready: $(BIN)/accrue --help"

# Install the pinned torch first, so that pip uses the torch build that this machine's package index provides.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing torch and the other packages into $(VENV): about 2 GB, takes a few minutes"
	@for python in $(PYTHON) $$(ls $(BIN)/python 2>/dev/null); do \
	    $$python -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))" || { \
	        echo "$$python is $$($$python --version), and Accrue needs Python 3.11 to 3.13: delete $(VENV) if it exists, then try make PYTHON=python3.13 $(MAKECMDGOALS)"; exit 1; }; \
	done
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## Train a small model end to end over HTTP, and show what happened
	$(BIN)/accrue demo

test: check ## Run every check and the quick tests (a few minutes)
	$(BIN)/python -m pytest -m "not alone and not thorough" --numprocesses 3 --dist loadfile

test-all: test test-rest ## Run every check and every test but slow ones and long faults, on PostgreSQL too (about 25 minutes)

test-rest: $(STAMP) ## Run the tests that `make test` leaves out
	$(BIN)/python -m pytest -m "thorough and not alone" --numprocesses 3 --dist loadfile
	$(BIN)/python -m pytest -m alone
	$(BIN)/python -m pytest --postgresql --numprocesses 2 --dist loadfile $(DATABASE_TESTS)
	$(MAKE) test-trl

test-trl: $(STAMP) ## Install TRL if it is missing, and compare the losses of preference objectives with its own
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[trl]'
	$(BIN)/python -m pytest -s tests/training/test_against_trl.py

test-tools: $(STAMP) ## Install other training tools into .tools, and let them read the configurations written for them
	test -d .tools || $(BIN)/python -m venv .tools
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > "$$(.tools/bin/python -c 'import site; print(site.getsitepackages()[0])')/accrue.pth"
	.tools/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(TOOLS)
	.tools/bin/python -m pytest tests/planning/test_tools_read_configs.py tests/workers/executors/test_kubernetes.py

test-faults: $(STAMP) ## Inject the faults that take long, on SQLite and on PostgreSQL (about 40 minutes)
	$(BIN)/python -m pytest --faults tests/acceptance/test_every_fault.py tests/acceptance/test_faults.py tests/acceptance/test_rank_faults.py
	$(BIN)/python -m pytest --faults --postgresql tests/acceptance/test_every_fault.py tests/acceptance/test_faults.py

test-executors: $(STAMP) ## Install Slurm (needs root) and Ray if they are missing, and run trainers in them (about 12 minutes)
	command -v slurmctld > /dev/null || { apt-get update && apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client; } || true
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(BIN)/python -m pytest --slow tests/workers/executors tests/acceptance/test_executors.py

test-object-storage: $(STAMP) ## Move jobs between machines that share only a database and an S3 server (about 15 minutes)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[s3]' 'moto[s3]' flask flask-cors
	$(BIN)/python -m pytest --slow --postgresql tests/acceptance/test_object_storage.py

test-gpu: $(STAMP) ## Run what needs an NVIDIA GPU: tests, and the acceptance test (10 minutes); else say so
	PYTORCH_ALLOC_CONF=expandable_segments:True $(BIN)/python -m tests.gpu.acceptance
	PYTORCH_ALLOC_CONF=expandable_segments:True $(BIN)/python -m pytest tests/gpu

test-fuzz: $(STAMP) ## Send thousands of requests generated from the OpenAPI document (about 5 minutes)
	ACCRUE_FUZZ_CASES=60 $(BIN)/python -m pytest --timeout 900 tests/acceptance/test_fuzz.py

test-browser: $(STAMP) ## Install Chromium if it is missing, test the dashboard in it, and update the screenshots
	command -v chromium || { apt-get update && apt-get install --yes chromium; } || $(BIN)/playwright install chromium
	ACCRUE_SCREENSHOTS=docs/screenshots $(BIN)/python -m pytest tests/browser

test-images: $(STAMP) ## Run the Dockerfiles' steps in a plain Debian; needs root and debootstrap (about 10 minutes)
	unshare --mount $(BIN)/python -m tests.images.steps

test-slow: $(STAMP) ## Run the tests that take minutes
	$(BIN)/python -m pytest --slow -m slow

soak: $(STAMP) ## Run small jobs under random faults for an hour
	$(BIN)/python -m tests.benchmarks.soak

accuracy: $(STAMP) ## Compare predicted with true memory, and write tables and a chart (about 20 minutes)
	$(BIN)/python -m tests.benchmarks.accuracy
	$(BIN)/python -m tests.benchmarks.accuracy --families
	$(BIN)/python -m tests.benchmarks.recommended

bench-trainer: $(STAMP) ## Compare the trainer's speed with transformers' Trainer (about 40 minutes)
	$(BIN)/python -m tests.benchmarks.trainer
	$(BIN)/python -m tests.benchmarks.shapes --save

bench-queue: $(STAMP) ## Measure claims and stored log lines per second
	$(BIN)/python -m tests.benchmarks.queue

bench-api: $(STAMP) ## Measure requests per second with 10,000 jobs and 10 million steps stored (about 5 minutes)
	$(BIN)/python -m tests.benchmarks.api

bench-fleet: $(STAMP) ## Measure 100 workers and 10,000 queued jobs on PostgreSQL, with clients (about 2 minutes)
	$(BIN)/python -m tests.benchmarks.fleet

bench-dashboard: $(STAMP) ## Measure the dashboard in Chromium with bench-api's database (about 3 minutes)
	$(BIN)/python -m tests.benchmarks.dashboard

bench-memory: $(STAMP) ## Measure and predict peak memory by accumulation steps, and draw a chart (about 5 minutes)
	$(BIN)/python -m tests.benchmarks.memory

bench-devices: $(STAMP) ## Compare one and two ranks, unequal ones too, with Trainer under torchrun (about 15 minutes)
	$(BIN)/python -m tests.benchmarks.devices

bench-data: $(STAMP) ## Upload a million samples as JSON lines, CSV and Parquet, and tokenise them (about 10 minutes)
	$(BIN)/python -m tests.benchmarks.rows

bench-durations: $(STAMP) ## Predict how long jobs take, and train them (about 10 minutes)
	$(BIN)/python -m tests.benchmarks.durations

families: $(STAMP) ## Train a small model of every family that transformers knows, and write a table (about 15 minutes)
	$(BIN)/python -m tests.benchmarks.families

bench-inference: $(STAMP) ## Measure how fast a model answers, beside transformers serve
	$(BIN)/pip install --quiet -c constraints.txt 'transformers[serving]'
	$(BIN)/python -m tests.benchmarks.inference --save

bench-variance: $(STAMP) ## Measure the loss variance by accumulation steps, and draw a chart
	$(BIN)/python -m tests.benchmarks.variance

check: $(STAMP) ## Check lint, formatting, types, Dockerfiles and the compose files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/biome check --error-on-warnings app/dashboard
	$(BIN)/hadolint docker/*.Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml docker/compose.worker.yaml docker/compose.worker-s3.yaml

format: $(STAMP) ## Format the code and apply ruff's automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/biome check --write app/dashboard

serve: $(STAMP) ## Run the service and a worker at http://127.0.0.1:8000
	$(BIN)/accrue up

migrate: $(STAMP) ## Bring the database to the newest revision
	$(BIN)/accrue migrate

clean: ## Remove .venv and caches; your data stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
