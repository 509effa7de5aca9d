# Every target runs in .venv of this checkout, which it creates when missing, or in the Python that
# PYTHON= names, where nothing is installed and the package runs from the checkout.
#
#   make demo                               solved problems, fusions, times, with the bundled model
#   make test | check                       CPU tests | format, lint, types, layout, bindings of csrc
#   make test-all                           the cases that `make test` leaves to other seeds too
#   make test coverage COVERAGE=1           the same, and what share of the package's lines they run
#   make real-test                          a trained model of 135M says what transformers says
#   make draft-test                         served tools and grammars, by servers that all have drafts
#   make client-test                        a server, asked by lm-eval, guidellm, LiteLLM, LangChain
#   make emulated-test                      kernels of csrc on a CPU, in every division of their work
#   make mutants  MUTANTS='--count 20 --paths passes'    one-token edits of the sources that no test
#                                           sees, 200 by default; takes hours
#   make lines  REASON='why it grew'        sets the line budgets of tests/line_budget.toml
#   make models                             proves every model type of transformers; writes docs/models.md
#   make reference vllm-page                writes docs/reference.md and docs/coming-from-vllm.md
#   make pictures                           the tables and pictures of the documents, from bench/results
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
.PHONY: install demo test test-all real-test draft-test client-test emulated-test coverage check types \
  style lines mutants models docs pictures vllm-page reference gpu-test gpu-evidence bench

BOOTSTRAP_PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= 2
FOLDERS := config ops passes compiler graph_capture model_executor engine serve bench benchmarks
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

# pip installs torch, which may be a wheel that only pip's configuration names; uv leaves it as it
# is and adds what it needs. Modules are compiled when they are first imported: most never are.
.venv/.installed: pyproject.toml constraints.txt
	@echo '== environment: .venv (2 GB, half a minute or more on a first run)'
	test -x .venv/bin/python || $(BOOTSTRAP_PYTHON) -m venv .venv
	$(PY) -m pip install -q --no-deps --no-compile -c constraints.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0 uv
	tools/install.sh $(PY) $(PY) -c constraints.txt scikit-build-core
	tools/install.sh $(PY) $(PY) -c constraints.txt --no-build-isolation -C kernels=off \
	  -e '.[dev,otlp,serve]'
	touch $@

demo: install
	@$(PKGROOT); $(PY) -m fusewright.serve.cli demo

test: install
	@rm -rf build/coverage
	@$(PKGROOT); OMP_NUM_THREADS=1 $(PY) -m pytest -m 'not gpu' -n $(JOBS) \
	  --dist loadfile --no-loadscope-reorder $(if $(COVERAGE),--fw-coverage) $(TEST_FLAGS)

test-all:
	@$(MAKE) --no-print-directory test TEST_FLAGS='--fw-cases 2'

mutants: install
	@$(PKGROOT); $(PY) tools/mutants.py --jobs $(JOBS) $(MUTANTS)

# A model that differs shows on the page too, and makes the target fail.
models: install
	@$(PKGROOT); failed=0; $(PY) -m fusewright.serve.cli models check --all --jobs $(JOBS) \
	  --json bench/results/models.json || failed=$$?; \
	  $(PY) tools/models_page.py; exit $$failed

# The documents' tables and pictures, from the result files in bench/results.
pictures: install
	@$(PKGROOT); $(PY) -m fusewright.benchmarks.report --pictures

# The pages of vLLM's arguments, and of our own options and flags; quick, and without a model.
vllm-page reference: install
	@$(PKGROOT); $(PY) tools/$(if $(filter reference,$@),reference,vllm)_page.py

real-test: install
	@$(PKGROOT); $(PY) -m pytest -q tests/engine/test_real_model.py --fw-cases 2 --durations 4

DRAFTS ?= {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": false}
DRAFTED := tool_calls forms clients messages conversations harmony thinking_server strict_server \
  reasoning call_reader logprobs server server_bodies server_input server_limits server_usage \
  request_fields draft_metrics

draft-test: install
	@$(PKGROOT); OMP_NUM_THREADS=1 $(PY) -m pytest -m 'not gpu' -n $(JOBS) --dist loadfile \
	  $(DRAFTED:%=tests/serve/test_%.py) --fw-drafts '$(DRAFTS)'

# Each thread of a kernel is a fiber. Needs g++ and the CUDA headers of a toolkit or of Triton's wheel.
emulated-test: install
	@$(PKGROOT); OMP_NUM_THREADS=1 $(PY) -m pytest -q tests/emulator -n $(JOBS) --dist load

client-test: install build/clients/.installed
	@$(PKGROOT); OMP_NUM_THREADS=1 $(PY) tools/client_test.py build/clients/bin

# An environment of their own, as their versions are not those of constraints.txt; only torch comes
# from where the package has it. The folder of that torch is searched last and its .pth files are
# not read, so that the clients' own versions win and the package is not there.
build/clients/.installed: tools/clients.txt | install
	$(PY) -m venv --clear --without-pip build/clients
	tools/install.sh $(PY) build/clients/bin/python --no-deps -r $<
	$(PY) -c 'from importlib.util import find_spec; from pathlib import Path; \
	  print(Path(find_spec("torch").origin).parent.parent)' \
	  >"$$(echo build/clients/lib/python*/site-packages)/torch.pth"
	touch $@

coverage: install
	@$(PY) -m coverage combine -q
	@$(PY) -m coverage report | tail -n 1

# Types take as long as all the rest, so both run at once. CI has the layout among its tests, and
# needs no cache of types, which nobody would read.
check: install
	@$(MAKE) --no-print-directory -j 2 -O types style
	@$(PY) tools/gpu_stamp.py check

types:
	$(PKGROOT); MYPYPATH="$$PKGROOT" $(PY) -m mypy --strict \
	  $(if $(CI),--cache-dir=/dev/null) \
	  $(patsubst %/__init__.py,-p fusewright.%,$(wildcard $(FOLDERS:=/__init__.py))) \
	  | sed 's|^build/pkgroot/fusewright/||'

lines: install
	@$(PY) tests/line_budget.py --reason '$(REASON)'

style:
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	PATH="$(dir $(PY)):$$PATH" clang-format --dry-run -Werror $(CSRC)
	$(if $(CI),,$(PKGROOT); $(PY) -m pytest -q tests/test_layout.py -m 'not slow')
	@PATH="$(dir $(PY)):$$PATH" PYTHONPATH=tools $(PY) tools/check_bindings.py

ifndef PYTHON
docs: .venv/.docs
.venv/.docs: .venv/.installed
	tools/install.sh $(PY) $(PY) -c constraints.txt mkdocs-material
	touch $@
endif
docs: install
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

gpu-test: install
	@PYTHON=$(PY) tools/gpu.sh test

gpu-evidence: install
	@PYTHON=$(PY) tools/gpu.sh run $(PY) -m fusewright.benchmarks.evidence \
	  $(if $(COMMIT),--commit $(COMMIT)) $(if $(RESULTS),--results $(RESULTS))

bench: install
	@PYTHON=$(PY) tools/gpu.sh run $(PY) -m fusewright.benchmarks.evidence kernels.jsonl \
	  $(if $(COMMIT),--commit $(COMMIT)) $(if $(RESULTS),--results $(RESULTS))
