# Thin: every target is one command of the installed package, after setting it up if needed.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

.PHONY: quickstart test test-fast lint format bench wheel clean

quickstart: $(STAMP)
	$(BIN)/sparse-bitnet quickstart

test: $(STAMP)
	$(BIN)/python -m pytest tests -n 2

test-fast: $(STAMP)
	$(BIN)/python -m pytest tests -n 2 -m "not slow"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/layer.py

wheel: $(STAMP)
	$(BIN)/python -m build

$(STAMP): $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache
