# make train   a small model learns on whatever this machine has (TEXT=file for your own text)
# make quick   while you work: pure rooms, ops, a handful of layouts and a checkpoint; under 2 minutes on 2 cores
# make test    lint, types, import direction and the fast tests
# make soak    the large sets of tests; soak.md says what was run (JOBS=44: so many at once)
# make slurm   install SLURM's packages for the tests of phalanx launch (root, Debian)
# make docs    the pages as a site, in site/
# make test-gpu  tests that need a GPU

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
JOBS ?= logical
# Python compiles what is imported when it is: a tenth of the files.
PIP := $(PY) -m pip install --disable-pip-version-check --quiet --no-compile

# Ranks of the tests share few cores: more threads than cores makes them hundreds of times slower.
export OMP_NUM_THREADS ?= 1
# Compiled modules are kept where the environment says otherwise too: the tests start hundreds of interpreters, and each
# would compile torch anew.
export PYTHONDONTWRITEBYTECODE :=
# The package is used where it lies; nothing is installed into the environment but what it needs.
export PYTHONPATH := $(CURDIR)

.PHONY: help env env-dev train quick test fast lint types imports docs soak slurm test-gpu clean

help:
	@sed -n 's/^# make/make/p' Makefile

env: $(VENV)/.ready
env-dev: $(VENV)/.ready-dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Phalanx needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: requirements.txt | $(VENV)/bin/python
	$(PIP) -r requirements.txt
	@touch $@

$(VENV)/.ready-dev: requirements.txt requirements-dev.txt | $(VENV)/bin/python
	$(PIP) -r requirements-dev.txt
	@touch $@ $(VENV)/.ready

# The demo may use every core.
train: $(VENV)/.ready
	env -u OMP_NUM_THREADS $(PY) -m phalanx.cli.demo $(if $(TEXT),--text "$(TEXT)")

# tests/quick.py has the list, and why each entry is on it. Its whole files run beside each other, no layout twice.
quick: $(VENV)/.ready-dev
	@$(PY) -m tests.quick | tr '\n' '\0' | xargs -0 $(PY) -m pytest -m "not soak and not gpu" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# The types are checked beside the tests, which leave a core free now and then.
test: lint imports
	$(MAKE) --no-print-directory -j2 types fast

fast: $(VENV)/.ready-dev
	$(PY) -m pytest tests -m "not soak and not gpu" -n 2 --dist loadfile --no-loadscope-reorder --durations 25 $(ARGS)

lint: $(VENV)/.ready-dev
	$(PY) -m ruff check phalanx tests benchmarks examples recipes
	$(PY) -m ruff format --check -q phalanx tests benchmarks examples recipes

types: $(VENV)/.ready-dev
	$(PY) -m mypy

imports: $(VENV)/.ready-dev
	$(VENV)/bin/lint-imports

# What tests/launch/test_slurm.py runs, for machines of CI: a root on Debian. Elsewhere those tests skip, and say why.
slurm:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v sbatch >/dev/null; then \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends slurm-wlm munge; } >/dev/null 2>&1 \
	  || echo "slurm-wlm and munge cannot be installed: the tests of SLURM will skip"; fi

# Strictly: a link or an anchor that leads nowhere is an error.
docs: $(VENV)/.ready-dev
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

# The longest files begin first, and who is done takes the next test.
soak: $(VENV)/.ready-dev
	$(PY) -m pytest tests -m soak -n $(JOBS) --dist load --maxschedchunk 2 --table soak.md $(ARGS)

# Uses the Python that is there: GPU machines bring their own torch.
test-gpu:
	$(PYTHON) -m pytest tests -m gpu $(ARGS)

clean:
	rm -rf site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
