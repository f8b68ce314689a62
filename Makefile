# Both commands set up everything they need in .venv first, and can be run again at any time.

# The tested versions in constraints.txt were frozen on Python 3.11; any from 3.10 on will do.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.10; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && { echo "$$p"; break; }; done)
VENV ?= .venv
DEMO_DIR ?= $(or $(TMPDIR),/tmp)/pytorch_template_demo_$(shell id -u)
DEMO_ARGS ?=
PROJECT := {{cookiecutter.proj_name}}
REQUIREMENTS := requirements-dev.txt $(PROJECT)/requirements.txt $(PROJECT)/requirements-dev.txt

# Where the docs site is built.
SITE ?= site

# Tests at a time. Each is one or two processes with one thread, so two for each pair of cores.
JOBS ?= 2
# And of slow ones, which wait for the programs that they start.
SLOW_JOBS ?= $(shell expr 3 \* $(JOBS) / 2 2>/dev/null || echo $(JOBS))

# Which tests: "not slow", "slow", or all; of the template also "slow and not full", and "full".
SLOW ?=

# Slow tests start hundreds of programs: they are forked from one that has torch imported.
FORKED = $(if $(findstring not slow,$(SLOW)),,-p warm_runs --dist worksteal)
PYTEST = PYTHONPATH="$(CURDIR)/tests/template" "$(BIN)/python" -m pytest -q -p no:cacheprovider -p computed_once $(FORKED)

# Cases of the project's slow tests that are left to `make test-full`.
LEFT := ../tests/template/left_to_full.txt

# What runs the tests and timings of a GPU: any Python with PyTorch. ARGS="--only resume" is passed on.
GPU_PYTHON ?= $(if $(wildcard $(VENV)/.done),$(BIN)/python,python3)
GPU_PYTHON_VERSION ?= 3.12
ARGS ?=

# Packages whose tested version does not install on Python 3.10, which takes the newest that does.
NEWER_PYTHON := annotated-doc|backrefs|check-jsonschema|contourpy|filelock|fonttools|hypothesis|ipykernel|ipython|Markdown|matplotlib|mkdocs-material|networkx|numpy|pillow|platformdirs|pre_commit|python-dateutil|regress|rpds-py|scikit-learn|scipy|tornado|typer|watchdog
# And on Python 3.11.0 to 3.11.4; Debian 12 has 3.11.2.
NEWER_PATCH := pymdown-extensions

BIN := $(abspath $(VENV))/bin
# Bytecode is compiled afterwards, on all cores; what no test here imports is left out.
PIP := "$(BIN)/python" -m pip install -qq --no-compile --disable-pip-version-check --constraint constraints.txt
UV_PIP := "$(BIN)/uv" pip install --quiet --python "$(BIN)/python" --constraint constraints.txt
NOT_COMPILED := /(tests?|transformers/models)/

# For tests that call programs by name, such as shellcheck.
export PATH := $(BIN):$(PATH)

# Nothing is left in the project's folder by linting and testing it: what lies there is what a user gets.
export PYTHONDONTWRITEBYTECODE := 1
export RUFF_CACHE_DIR := $(CURDIR)/.ruff_cache
export MYPY_CACHE_DIR := $(CURDIR)/.mypy_cache

.DEFAULT_GOAL := help
.PHONY: help setup demo docs test test-all test-full test-accelerator test-gpu bench-gpu gpu-wheels mutate release lint types-template types-project types-engine test-project test-template constraints lock audit

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(VENV)/.done  ## make .venv with the tested versions of everything

demo: setup  ## render a project into DEMO_DIR, train on the CPU, evaluate, show where the results are
	@"$(BIN)/python" tools/demo.py "$(DEMO_DIR)" $(DEMO_ARGS)

docs: setup  ## build the docs site into SITE, a folder that git ignores
	@"$(BIN)/python" tools/docs_site.py "$(SITE)"

test: lint  ## every day: style, types, and the fast tests, of the project here and of the template
	@$(MAKE) --no-print-directory test-project test-template SLOW="not slow"

test-all: test  ## then the rest: full trainings, real clusters, and the tests of rendered projects
	@$(MAKE) --no-print-directory test-project SLOW=slow JOBS=$(SLOW_JOBS)
	@$(MAKE) --no-print-directory test-template SLOW="slow and not full" JOBS=$(SLOW_JOBS)
	@echo "== all tests passed"

test-full: test-all  ## before a release: also every combination of parts, planted mistake and example, and properties at length
	@$(MAKE) --no-print-directory test-template SLOW=full JOBS=$(SLOW_JOBS)
	@echo "== tests of the project (full)"
	@cd "$(PROJECT)" && $(PYTEST) -n $(SLOW_JOBS) $$(sed 's/--deselect=//' $(LEFT))
	@echo "== tests of the engine (full)"
	@$(PYTEST) -n $(SLOW_JOBS) -m full tests/engine
	@echo "== properties of the engine, on many examples"
	@PROPERTIES=many "$(BIN)/python" -m pytest -q -p no:cacheprovider -n $(JOBS) tests/engine/properties
	@echo "== every combination passed"

test-accelerator: setup  ## on an emulated accelerator, late on purpose: what goes wrong between a program and its device
	@"$(BIN)/python" -m pytest -q -p no:cacheprovider -n $(JOBS) tests/engine/accelerator

test-gpu:  ## on an NVIDIA GPU: what only that can show; needs PyTorch, no network and no set-up. See docs/gpu.md
	@"$(GPU_PYTHON)" tools/gpu.py test $(ARGS)

bench-gpu:  ## on an NVIDIA GPU: samples/s and MFU of three models, against a bare loop
	@"$(GPU_PYTHON)" tools/gpu.py bench $(if $(ARGS),-- $(ARGS))

gpu-wheels:  ## for a machine without network: collect what its Python may lack, in .gpu-wheels; needs the internet
	@"$(GPU_PYTHON)" tools/gpu.py wheels --python-version $(GPU_PYTHON_VERSION) $(ARGS)

mutate: setup  ## break the code in one place at a time: does the named test fail? FAULTS="clip signal": some only
	@"$(BIN)/python" tools/mutate.py --jobs $(JOBS) $(FAULTS)

release: setup  ## check, keep a run, write the notes, tag; push nothing. VERSION=0.2.0; CHECKED=1: test-full has passed
	@"$(BIN)/python" tools/release.py "$(VERSION)" $(if $(CHECKED),--checked)

lint: setup  ## style and types, of the template and of the project inside it
	@echo "== style, of the template and of the project as it lies there"
	@"$(BIN)/ruff" check --quiet . && "$(BIN)/ruff" format --quiet --check .
	@cd "$(PROJECT)" && "$(BIN)/ruff" check --quiet . && "$(BIN)/ruff" format --quiet --check .
	@echo "== types, of the template, the project, and the tests of its engine"
	@$(MAKE) --no-print-directory -j 2 types-template types-engine

# The last two have the same settings, and share a cache; with others, mypy would rebuild it in half a minute.
types-template:
	@"$(BIN)/mypy" --no-error-summary --cache-dir "$(MYPY_CACHE_DIR)/template"

types-project:
	@cd "$(PROJECT)" && "$(BIN)/mypy" --no-error-summary --cache-dir "$(MYPY_CACHE_DIR)/project"

types-engine: types-project
	@cd "$(PROJECT)" && "$(BIN)/mypy" --no-error-summary --cache-dir "$(MYPY_CACHE_DIR)/project" --config-file ../tests/engine/pyproject.toml

test-project: setup  ## the project's own tests, as it lies in the template, and those of its engine
	@echo "== tests of the project as it lies in the template$(if $(SLOW), ($(SLOW)))"
	@cd "$(PROJECT)" && $(PYTEST) -n $(JOBS) -m "$(SLOW)" $(if $(filter slow,$(firstword $(SLOW))),@$(LEFT))
	@echo "== tests of the engine that rendered projects do not carry$(if $(SLOW), ($(SLOW)))"
	@$(PYTEST) -n $(JOBS) -m "$(SLOW)$(if $(filter slow,$(SLOW)), and not full)" tests/engine

test-template: setup  ## answers, hooks, and the tests of rendered projects
	@echo "== tests of the template, and of rendered projects$(if $(SLOW), ($(SLOW)))"
	@$(PYTEST) -n $(JOBS) -m "$(SLOW)"

constraints: setup  ## write the versions that are installed now to constraints.txt
	@{ sed -n '/^#/p' constraints.txt; "$(BIN)/python" -m pip freeze --disable-pip-version-check \
		| sed -n 's/^\([A-Za-z0-9._-]*==[0-9.a-z]*\).*/\1/p' \
		| sed -E 's/^($(NEWER_PYTHON))==.*/&; python_version >= "3.11"/; s/^($(NEWER_PATCH))==.*/&; python_full_version >= "3.11.5"/'; } > .constraints.new
	@mv .constraints.new constraints.txt

lock: setup  ## write requirements.lock of the project, with the versions of constraints.txt
	@$(MAKE) --no-print-directory -C "$(PROJECT)" lock UV="$(BIN)/uv" ARGS="-c ../constraints.txt"

audit: setup  ## known holes of the locked versions, as PyPI tells; needs the internet
	@"$(BIN)/uv" tool run --quiet pip-audit --strict --disable-pip --require-hashes --progress-spinner off \
		--requirement "$(PROJECT)/requirements.lock"

$(VENV)/.done: constraints.txt $(REQUIREMENTS)
	@command -v "$(PYTHON)" >/dev/null || { echo "no Python >= 3.10 was found$(if $(PYTHON), as $(PYTHON)); name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "== set-up: $(VENV) with $$("$(PYTHON)" --version 2>&1)"
	@"$(PYTHON)" -m venv "$(VENV)" || { echo "no virtual environment could be made; on Debian: apt install python3-venv" >&2; exit 1; }
	@echo "== set-up: torch"
	@$(PIP) torch uv
	@echo "== set-up: everything else"
	@set -- $(foreach file,$(REQUIREMENTS),-r "$(file)"); $(UV_PIP) "$$@" || \
		{ echo "== set-up: again by pip, which has settings of its own, and takes a minute longer"; $(PIP) "$$@"; }
	@"$(BIN)/python" -m compileall -qq -j 0 -x "$(NOT_COMPILED)" "$(abspath $(VENV))/lib" || true  # some packages ship files for other versions of Python
	@touch $@
