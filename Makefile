# SPDX-License-Identifier: Apache-2.0
# Thin: every target is one command of the installed package, after setting it up if needed.
PYTHON ?= $(firstword $(foreach minor,11 12 13 14,$(shell command -v python3.$(minor) 2>/dev/null)) python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml constraints.txt requirements.lock CMakeLists.txt $(wildcard csrc/*)

# Tests that reach the extension, and where its other build goes.
SANITIZED := build/sanitize/site
SANITIZED_TESTS := $(addprefix tests/kernels/test_,cpu.py matmul.py repack.py thread_pool.py) \
	$(addprefix tests/engine/test_,decoder.py engine.py kv_cache.py engine_model.py)

.PHONY: quickstart experiments docs test test-fast test-light test-wheel sanitize cross lint format gpu wheel lock clean

quickstart: $(STAMP)
	$(BIN)/sparse-bitnet quickstart

# The repository's pages of experiments, from the committed results.
experiments: $(STAMP)
	$(BIN)/sparse-bitnet report docs/results/cpu-paper docs/results/cpu docs/results/cpu-ideas \
		--engine $(lastword $(sort $(wildcard benchmarks/results/*_table3.jsonl))) \
		--document docs/experiments.md

# The site, from docs/ and the docstrings, in build/site; a link that leads nowhere is an error.
docs: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt mkdocs-material "mkdocstrings[python]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

test: $(STAMP)
	$(BIN)/python -m pytest tests -n 2 --dist worksteal

test-fast: $(STAMP)
	$(BIN)/python -m pytest tests -n 2 --dist worksteal -m "not slow"

# Without torch: what needs it is skipped.
LIGHT := build/light-$(notdir $(PYTHON))
test-light: $(LIGHT)/.installed
	$(LIGHT)/bin/python -m pytest tests -n 2 --dist worksteal

$(LIGHT)/.installed: $(SOURCES)
	$(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/pip install --quiet --constraint constraints.txt --editable ".[test,grammar]"
	touch $@

# The wheel alone in an empty environment; needs a package index.
test-wheel: wheel
	SPARSE_BITNET_TEST_WHEEL="$$(ls $(CURDIR)/dist/*.whl)" $(BIN)/python -m pytest tests/cli/test_light_core.py

# Python is not instrumented: the sanitizer's library comes first, and malloc serves every object. Output
# captured by descriptor would be lost with the process.
sanitize: $(STAMP)
	CXX=g++ $(BIN)/pip install --quiet --no-deps --upgrade --target $(SANITIZED) . \
		-C build-dir=build/sanitize -C install.strip=false \
		-C cmake.define.SPARSE_BITNET_SANITIZE=address,undefined
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	SPARSE_BITNET_EXTENSION="$$(echo $(SANITIZED)/sparse_bitnet/_cpu.*so)" PYTHONPATH=tests \
		$(BIN)/python -m pytest -p sanitized_extension --capture=sys $(SANITIZED_TESTS)

# The engine for other systems: every source compiled with zig, the self-test linked and run where it can be.
cross: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt ziglang
	PYTHON=$(BIN)/python .ci/cross

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/deptry src
	$(BIN)/python .ci/budgets
	$(BIN)/python .ci/words

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a machine with an NVIDIA GPU: CUDA tests and the paper's Table 3; again, it resumes.
gpu: $(STAMP)
	$(BIN)/python -m pytest -q tests/ops/test_cuda.py; tests=$$?; $(BIN)/sparse-bitnet bench gpu && exit $$tests

wheel: $(STAMP)
	$(BIN)/python -m build

$(STAMP): $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-deps --require-hashes --requirement requirements.lock
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	cp $(VENV)/lib/python*/site-packages/sparse_bitnet/_cpu.pyi src/sparse_bitnet/ || true  # for mypy
	touch $@

# Every package that constraints.txt leaves open, with hashes. What torch brings of its own for a GPU is
# left to torch.
lock:
	uv pip compile --quiet --extra dev --constraint constraints.txt --output-file requirements.lock pyproject.toml

clean:
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache
