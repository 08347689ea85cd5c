# `make demo` and `make test` are complete on a fresh clone: they set the project up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test check test-slow fuzz

help:
	@echo "make demo    train a small policy on real functions, here, now (about 15 minutes; writes runs/demo)"
	@echo "make test    the tests (about 10 minutes at most)"
	@echo "make fuzz    the property tests on new, many and random examples"
	@echo "make check   format, lint, types, import rules"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tidemill needs Python 3.11 or later, and this is %s: make PYTHON=/path/to/python3.11" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/tidemill run recipes/quickstart.py --out runs/demo
	$(BIN)/tidemill audit runs/demo
	$(BIN)/tidemill report runs/demo -o runs/demo/report.html

test: setup
	$(BIN)/pytest -m 'not slow and not gpu'

test-slow: setup
	$(BIN)/pytest -m slow

fuzz: setup
	HYPOTHESIS_PROFILE=fuzz $(BIN)/pytest tests/law tests/unit

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
