# Everything happens in .venv; stamp files make repeated calls instant.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
NPU := 2.13.0
WORKERS ?= 2
# What a push runs is what changed since this commit: the last that passed; everything where it is empty.
SINCE ?= green
SYSTEM := $(shell uname -s)

export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup check test nightly mutate conversions demo bench docs dist drift site clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-8s %s\n", $$1, $$2 }'

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# Never importable by default: the tests of the vendor's compiler give it to child processes.
.torch_npu/.installed: $(VENV)/.torch
ifeq ($(SYSTEM),Linux)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --no-deps --target .torch_npu torch_npu==$(NPU)
else
	mkdir -p .torch_npu
endif
	touch $@

setup: $(VENV)/.installed .torch_npu/.installed  ## create .venv with everything, and the torch_npu wheel beside it

check: setup  ## format, lint, types, imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --project pyproject.toml --pythonpath $(BIN)/python
	$(BIN)/lint-imports

test: check  ## check, and the tests of what changed since they last passed, with a smoke of all others
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --since=$(SINCE)
	$(if $(filter-out green,$(SINCE)),,$(BIN)/python -m tests.changed)

nightly: check  ## check, and every test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'nightly or not nightly'
	$(BIN)/python -m tests.changed

mutate: $(VENV)/.installed  ## drop one guard at a time: some test must fail (hours; for the night)
	$(BIN)/python -m tests.mutation --workers $(WORKERS)

conversions: setup  ## every example and model through torchair and npugraph_ex, as far as no device is needed
	$(BIN)/python -m tests.conversions

demo: $(VENV)/.installed  ## a Hugging Face model before and after, with its numbers checked
	$(BIN)/python examples/demo.py

bench: $(VENV)/.installed  ## what the pass costs beside tracing, and beside others (a quick set: minutes)
	$(BIN)/python -m benchmarks.pass_cost --layers 2 --layers 4 --rounds 1 --incumbents --never 100

docs: $(VENV)/.installed  ## write the generated pages of docs/
	$(BIN)/python -m docs.build

drift: $(VENV)/.installed  ## what the newest wheel of torch_npu changes of the operators here (downloads it)
	$(BIN)/python -m tests.operators.wheel_versions --drift .cache/wheels

dist: $(VENV)/.installed  ## build the sdist and the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

site: $(VENV)/.installed  ## build the documentation as a site that needs no network: build/site/index.html
	$(BIN)/python -m docs.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file build/mkdocs.yml

clean:  ## remove everything that can be made again
	rm -rf $(VENV) .torch_npu .pytest_cache .ruff_cache .import_linter_cache .hypothesis .cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
