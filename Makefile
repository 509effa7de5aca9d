# Every target runs in .venv of this checkout, which it creates when missing, or in the Python that
# PYTHON= names, where nothing is installed and the package runs from the checkout.
#
#   make demo                               solved problems, fusions, times, with the bundled model
#   make test | check                       CPU tests | format, lint, types, layout, bindings of csrc
#   make test coverage COVERAGE=1           the same, and what share of the package's lines they run
#   make client-test                        a server, asked by lm-eval and guidellm; installs them
#   make docs                               the documents as a site: build/site/index.html
#   make gpu-test | bench  PYTHON=python3   on a GPU machine: these build csrc first
#   make gpu-evidence  PYTHON=python3       also: measures what the documents show, in 25 minutes at
#                                           most; COMMIT=HASH where git is missing, RESULTS=FOLDER
#
# Nothing else here builds csrc, also where nvcc is there: tools/build_csrc.sh does.
#
# A CPU-only machine without a local mirror saves gigabytes of CUDA libraries with
#   make install TORCH_INDEX=https://download.pytorch.org/whl/cpu

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: install demo test client-test coverage check types style docs gpu-test gpu-evidence bench

BOOTSTRAP_PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= 2
FOLDERS := config ops passes compiler graph_capture model_executor engine serve bench
CSRC := $(shell find csrc -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h')

# The root holds folders called config and ops: keep it off sys.path.
export PYTHONSAFEPATH := 1
# Processes that start by the hundred, as in the tests, compile no module twice.
export PYTHONDONTWRITEBYTECODE :=

PKGROOT := source tools/pkgroot.sh

ifdef PYTHON
PY := $(PYTHON)
install: # an editable install of another checkout in that Python would win over this one
	@$(PKGROOT); $(PY) -c 'import fusewright, os, sys; \
	  here = os.path.samefile(os.path.dirname(fusewright.__file__), "."); \
	  sys.exit(None if here else f"$(PYTHON) imports {fusewright.__file__}, not this checkout")'
export PYTHONPATH := $(CURDIR)/build/pkgroot$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(CURDIR)/.venv/bin/python
install: .venv/.installed
endif

.venv/.installed: pyproject.toml constraints.txt
	@echo '== environment: .venv (2 GB, a minute or more on a first run)'
	test -x .venv/bin/python || $(BOOTSTRAP_PYTHON) -m venv .venv
	$(PY) -m pip install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	$(PY) -m pip install -c constraints.txt scikit-build-core
	$(PY) -m pip install -c constraints.txt --no-build-isolation -C kernels=off \
	  -e '.[dev,otlp,serve]'
	touch $@

demo: install
	@$(PKGROOT); $(PY) -m fusewright.serve.cli demo

test: install
	@rm -rf build/coverage
	@$(PKGROOT); OMP_NUM_THREADS=1 $(PY) -m pytest -m 'not gpu' -n $(JOBS) \
	  --dist loadfile --no-loadscope-reorder $(if $(COVERAGE),--fw-coverage)

# Not in CI: to install them takes minutes, and to run them another.
client-test: install build/clients/.installed
	@$(PKGROOT); $(PY) tools/client_test.py build/clients/bin

build/clients/.installed:
	test -x build/clients/bin/python || $(BOOTSTRAP_PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install -q \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0 \
	  'lm-eval[api]==0.4.13' guidellm==0.8.1
	touch $@

coverage: install
	@$(PY) -m coverage combine -q
	@$(PY) -m coverage report | tail -n 1

# Types take as long as all the rest, so both run at once.
check: install
	@$(MAKE) --no-print-directory -j 2 -O types style
	@$(PY) tools/gpu_stamp.py check

types:
	$(PKGROOT); MYPYPATH="$$PKGROOT" $(PY) -m mypy --strict \
	  $(patsubst %/__init__.py,-p fusewright.%,$(wildcard $(FOLDERS:=/__init__.py))) \
	  | sed 's|^build/pkgroot/fusewright/||'

style:
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	PATH="$(dir $(PY)):$$PATH" clang-format --dry-run -Werror $(CSRC)
	$(PKGROOT); $(PY) -m pytest -q tests/test_layout.py -m 'not slow'
	@PATH="$(dir $(PY)):$$PATH" PYTHONPATH=tools $(PY) tools/check_bindings.py

ifndef PYTHON
docs: .venv/.docs
.venv/.docs: .venv/.installed
	$(PY) -m pip install -c constraints.txt mkdocs-material
	touch $@
endif
docs: install
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

gpu-test: install
	@PYTHON=$(PY) tools/gpu.sh test

gpu-evidence: install
	@PYTHON=$(PY) tools/gpu.sh run $(PY) -m fusewright.bench.evidence \
	  $(if $(COMMIT),--commit $(COMMIT)) $(if $(RESULTS),--results $(RESULTS))

bench: install
	@PYTHON=$(PY) tools/gpu.sh run $(PY) -m fusewright.bench.evidence kernels.jsonl \
	  $(if $(COMMIT),--commit $(COMMIT)) $(if $(RESULTS),--results $(RESULTS))
