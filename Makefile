# Every target sets up what it needs; `make` alone lists them.
.DEFAULT_GOAL := help
.PHONY: help setup gpu gpu-check train draw test test-all lint clean

VENV := .venv
STAMP := $(VENV)/.installed
SOURCES := mimo bridge data encoders generators benchmarks examples tests
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt
# Two at a time: much of a test is waiting for ranks. A file's tests share what they set up, and
# files start in the order of `tests/conftest.py`.
PYTEST := $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install the project with its tools

$(STAMP): pyproject.toml constraints.txt
	@python=; for candidate in python3 python3.12 python3.13 python3.14 python3.15; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	    python=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "make: no Python 3.12 or newer found; install one (on Debian or Ubuntu:" \
	    "apt install python3.12 python3.12-venv) and run make again" >&2; exit 1; \
	fi; \
	test -x $(VENV)/bin/python || $$python -m venv $(VENV)
	$(PIP) -e ".[dev]"
	@touch $@

gpu: setup  ## add Transformer Engine and flash-attn, compiled for the torch of .venv (many minutes)
	$(PIP) ninja wheel packaging pybind11
	NVTE_FRAMEWORK=pytorch $(PIP) --no-build-isolation \
	  "transformer-engine[pytorch,core_cu13]" flash-attn flash-linear-attention
	$(VENV)/bin/python -m mimo.ops.acceleration

gpu-check: setup  ## on a machine with a GPU: its tests, small jobs and speed, in twenty minutes
	$(VENV)/bin/python -m benchmarks.gpu

train: setup  ## write the data of examples/digits, train on it, and answer unseen examples
	$(VENV)/bin/python -m examples.digits
	$(VENV)/bin/mimo train recipes/quickstart.yaml
	$(VENV)/bin/mimo evaluate runs/quickstart

draw: setup  ## write digits to read and to draw, train on them with a generator, and score both
	$(VENV)/bin/python -m examples.digits drawings
	$(VENV)/bin/mimo train recipes/draws_digits.yaml
	$(VENV)/bin/mimo evaluate runs/draws_digits --guidance 2
	$(VENV)/bin/python -m examples.digits.judge runs/draws_digits

test: setup  ## run at least one test of every capability, in 8 minutes on two cores
	$(PYTEST) -m "not slow"

test-all: setup  ## run all tests
	$(PYTEST)

lint: setup  ## check style, types, who imports whom, and the size of the code
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m tests.limits

clean:  ## remove what the commands wrote, but not .venv
	rm -rf runs datasets build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
