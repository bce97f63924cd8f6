# Every target sets itself up: all it needs is Python 3.10–3.13 with pip, and GNU make.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= 2

STAMP := $(VENV)/.installed
RUN := $(VENV)/bin/python

# What an unrelated environment or pip configuration sets must not reach this one.
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV PIP_TARGET PIP_PREFIX
export PIP_USER := 0
export PIP_REQUIRE_VIRTUALENV := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help run test test-all lint bench clean

help:
	@echo "make run       a p8 network, its equivariance errors and a picture of its filters, in outputs/"
	@echo "make test      the fast tests, in less than ten minutes"
	@echo "make test-all  all tests"
	@echo "make lint      style, types and the order of the modules"
	@echo "make bench     time, size, initialisation and equivariance, in outputs/"
	@echo "make clean     remove the environment, the caches and what was built; outputs/ stays"
	@echo
	@echo "PYTHON=python3.12   the interpreter to set up with ($(PYTHON) now)"
	@echo "VENV=folder         where to set up ($(VENV) now); another interpreter needs another folder"
	@echo "JOBS=2              how many tests run side by side"
	@echo "ARGS='-k groups'    further arguments for run, test and test-all"

run: $(STAMP)
	@$(RUN) examples/demonstration.py --output outputs $(ARGS)

test: $(STAMP)
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n $(JOBS) -m "not slow" $(ARGS)

test-all: $(STAMP)
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n $(JOBS) $(ARGS)

lint: $(STAMP)
	@echo "ruff check"; $(RUN) -m ruff check .
	@echo "ruff format --check"; $(RUN) -m ruff format --check .
	@echo "mypy"; $(RUN) -m mypy
	@echo "lint-imports"; $(VENV)/bin/lint-imports

bench: $(STAMP)
	@mkdir -p outputs
	@$(RUN) benchmarks/layer_speed.py --json outputs/layer_speed.json
	@$(RUN) benchmarks/engines.py --json outputs/engines.json
	@$(RUN) benchmarks/build.py --json outputs/build.json
	@$(RUN) benchmarks/initialisation.py
	@$(RUN) benchmarks/equivariance.py --json outputs/equivariance.json

clean:
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find benchmarks examples src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp stands for a finished installation. It goes first and comes back last, and without it
# the environment is made from nothing: an interrupted installation leaves nothing to trust.
# Debian's Python comes without ensurepip; there the pip that is at hand installs another.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "econv needs Python 3.10 or later as PYTHON; '$(PYTHON)' is older or missing" >&2; exit 1; }
	@if [ -e $@ ] && $(RUN) -c '' 2>/dev/null; then rm -f $@; else \
		echo "Creating $(VENV) with $$($(PYTHON) --version)"; \
		rm -rf $(VENV); \
		if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); else \
			$(PYTHON) -m venv --without-pip $(VENV) && \
			$(RUN) "$$($(PYTHON) -c 'import pip; print(pip.__path__[0])')" \
				install --quiet --ignore-installed pip; fi; fi
	@echo "Installing econv and its tools into $(VENV) (minutes, the first time)"
	@$(RUN) -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
