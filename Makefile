# make demo    train a small hybrid model packed, and the same padded, and compare
# make test    the whole test suite
# make build   the CPU variant, into build/
# make bench   every op against its alternatives, into benchmarks/results/
# make check   lint, format of C++ and ABI of the built variant
# make sanitize  fuzz kernels and bindings under guard pages and sanitizers; SANITIZE="--inputs 5000" for longer
# make variants  every variant that this platform can build
# make emulate  the aarch64 variant on an emulated CPU (downloads up to 3 GB)
# make variants-check  every CUDA variant in a CUDA build of torch without a GPU (downloads several GB)
# make versions  what runs with which torch, Python and transformers (an environment for each, GB to download)
# make fresh   demo and tests in fresh clones and environments, and on other CPUs, compilers and kinds of torch
# Each needs python3 (3.11 or newer, with venv and headers) and g++ (11 or newer), says what is missing, and sets up
# .venv on first use (tools/environment.py): 0.6 GB to download, or 3 GB where only PyPI's CUDA build of torch is found.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready-$(shell cat requirements.txt tools/environment.py | sha256sum | cut -c1-12)

.PHONY: build demo test bench check variants variants-check emulate sanitize versions fresh clean
.DELETE_ON_ERROR:

$(READY): requirements.txt tools/environment.py
	@command -v $(PYTHON) > /dev/null || { echo "make: needs Python 3.11 or newer: apt-get install python3, or PYTHON=..."; exit 1; }
	@$(PYTHON) tools/environment.py
	@rm -f .venv/.ready-* && touch $@

build: $(READY)
	@$(BIN)/python tools/build.py

demo: build
	@$(BIN)/python examples/demo.py $(DEMO)

test: build
	@$(BIN)/python -m pytest tests -n auto --maxprocesses 8 --dist worksteal $(PYTEST)

bench: build
	@$(BIN)/python benchmarks/run.py $(BENCH)

check: build
	@$(BIN)/ruff check .
	@$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
	@$(BIN)/python tools/sync_build.py --check
	@$(BIN)/python tools/check.py

variants: $(READY)
	@$(BIN)/python tools/build.py --all

variants-check: variants
	@$(BIN)/python tools/check_variants.py

emulate: $(READY)
	@$(BIN)/python tools/emulate.py $(EMULATE)

sanitize: build
	@$(BIN)/python tools/sanitize.py $(SANITIZE)

versions: build
	@$(BIN)/python tools/versions.py $(VERSIONS)

fresh:
	@$(PYTHON) tools/fresh.py $(FRESH)

clean:
	rm -rf build
