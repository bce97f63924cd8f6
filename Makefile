# Every target sets itself up: all it needs is Python 3.10–3.13 with pip, and GNU make.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= 2
PEERS ?=
CASES ?=
SECONDS ?= 3600
PACKAGES := torchvision timm segmentation-models-pytorch monai einops
TORCH ?=

TEXTS := $(wildcard *.md *.toml *.cff .github Makefile benchmarks docs examples src tests tools)

STAMP := $(VENV)/.installed
RUN := $(VENV)/bin/python

# What an unrelated environment or pip configuration sets must not reach this one.
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV PIP_TARGET PIP_PREFIX
export PIP_USER := 0
export PIP_REQUIRE_VIRTUALENV := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help run test test-all fuzz fuzz-native test-packages test-gpu mutants soak lint docs examples notebooks bench release-check clean

help:
	@echo "make run       train a p8 network and its CNN twin on turned digits, compare them, in outputs/"
	@echo "make test      the fast tests, in less than ten minutes"
	@echo "make test-all  all tests"
	@echo "make fuzz      20,000 calls that nobody thought of, other ones each time; CASES=… for more"
	@echo "make fuzz-native  100,000 sets of arguments for compiled code, under AddressSanitizer"
	@echo "make test-packages  those with other packages' networks: torchvision, timm, monai and more"
	@echo "make test-gpu  those that need an NVIDIA GPU"
	@echo "make mutants   put faults into the code, one by one: tests must find 95 % of them"
	@echo "make soak      random shapes through every engine for SECONDS=3600: memory stays flat"
	@echo "make lint      style, types, the order of the modules, links and spelling"
	@echo "make docs      the documentation, in site/"
	@echo "make examples  the worked examples, which renew their pages of the documentation"
	@echo "make notebooks the notebooks, run from top to bottom, with their pictures"
	@echo "make bench     cost, compatibility, initialisation and equivariance, in outputs/"
	@echo "make release-check  build, look into the wheel, try it with the oldest and the newest torch"
	@echo "make clean     remove the environment, the caches and what was built; outputs/ stays"
	@echo
	@echo "PYTHON=python3.12   the interpreter to set up with ($(PYTHON) now)"
	@echo "VENV=folder         where to set up ($(VENV) now); another interpreter needs another folder"
	@echo "TORCH='torch==2.10.*'  another torch than that of constraints.txt; it needs another folder too"
	@echo "JOBS=2              how many tests run side by side"
	@echo "PEERS=python        bench: an interpreter that has escnn and e2cnn (benchmarks/compatibility.py)"
	@echo "ARGS=--fresh        further arguments for run, test, test-all and examples, such as ARGS='-k groups'"

run: $(STAMP)
	@$(RUN) -m econv_command demo --output outputs $(ARGS)

test: $(STAMP)
	@ECONV_GATE=test OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n $(JOBS) -m "not slow" $(ARGS)

test-all: $(STAMP)
	@ECONV_GATE=test-all OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n $(JOBS) $(ARGS)

# Other packages' networks, in an environment of their own: the rest has no need of them.
test-packages:
	@$(MAKE) --no-print-directory VENV=$(VENV)-packages $(VENV)-packages/.installed
	@$(VENV)-packages/bin/python -m pip install --quiet -c constraints.txt $(PACKAGES)
	@ECONV_GATE=test-packages OMP_NUM_THREADS=1 $(VENV)-packages/bin/python -m pytest -q -n $(JOBS) \
		tests/conversion tests/test_timm.py $(ARGS)

# On a machine with an NVIDIA GPU, by hand before a release; docs/compatibility.md has the record.
test-gpu: $(STAMP)
	@mkdir -p outputs
	@ECONV_GATE=test-gpu $(RUN) benchmarks/device_tests.py --processes $(JOBS) --within 3600 \
		--json outputs/device_tests.json $(ARGS)

# Faults that are put into the code: do tests find at least 95 %? Minutes to an hour, on one core.
mutants: $(STAMP)
	@mkdir -p outputs
	@$(RUN) tests/mutants/run.py --json outputs/mutants.json $(ARGS)

# Random shapes through every engine for SECONDS: memory flat, caches bounded.
soak: $(STAMP)
	@$(RUN) benchmarks/soak.py --seconds $(SECONDS) $(ARGS)

fuzz: $(STAMP)
	@ECONV_FUZZ=$(or $(CASES),20000) OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n $(JOBS) tests/fuzz $(ARGS)

fuzz-native: $(STAMP)
	@OMP_NUM_THREADS=1 $(RUN) tests/fuzz/native_gate.py --cases $(or $(CASES),100000) $(ARGS)

lint: $(STAMP)
	@echo "ruff check"; $(RUN) -m ruff check .
	@echo "ruff format --check"; $(RUN) -m ruff format --check .
	@echo "mypy"; $(RUN) -m mypy
	@echo "lint-imports"; $(VENV)/bin/lint-imports
	@echo "links"; $(RUN) tools/check_links.py
	@echo "codespell"; $(VENV)/bin/codespell --check-hidden $(TEXTS)

# Strict: a link, a name or a page that leads nowhere is an error.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
	@echo "Open site/index.html, or search as well: $(RUN) -m http.server -d site"

examples: $(STAMP)
	@for name in galaxies tissue waves; do $(RUN) examples/$$name.py --docs --seeds 3 $(ARGS) || exit 1; done

notebooks: $(STAMP)
	@$(RUN) tools/notebooks.py $(ARGS)

bench: $(STAMP)
	@mkdir -p outputs
	@$(RUN) benchmarks/build_and_size.py $(PEERS:%=--python %) --json outputs/build_and_size.json
	@$(RUN) benchmarks/compatibility.py $(PEERS:%=--python %) --json outputs/compatibility.json
	@$(RUN) benchmarks/export_speed.py --json outputs/export_speed.json
	@$(RUN) benchmarks/convert_and_rotate.py --seeds 3 --json outputs/convert_and_rotate.json
	@$(RUN) benchmarks/pretrained.py --json outputs/pretrained.json
	@$(RUN) benchmarks/quantisation.py --json outputs/quantisation.json
	@$(RUN) benchmarks/engines.py --json outputs/engines.json
	@$(RUN) benchmarks/networks.py --cpu --json outputs/networks.json
	@$(RUN) benchmarks/initialisation.py
	@$(RUN) benchmarks/equivariance.py --json outputs/equivariance.json

# Minutes, and gigabytes for a while: every torch comes into an environment of its own.
release-check: $(STAMP)
	@$(RUN) tools/release_check.py $(ARGS)

clean:
	rm -rf $(VENV) build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
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
	@if [ -n "$(TORCH)" ]; then $(RUN) -m pip install --quiet $(TORCH); fi
	@touch $@
