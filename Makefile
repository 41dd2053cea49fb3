# make demo    train a small hybrid model packed, and the same padded, and compare
# make test    the whole test suite
# make build   the CPU variant, into build/
# make bench   every op against its alternatives, into benchmarks/results/
# make check   lint, format rules and ABI of the built variant
# make sanitize  fuzz kernels and bindings under guard pages and sanitizers; SANITIZE="--inputs 5000" for longer
# make variants  every variant that this platform can build
# make variants-check  every CUDA variant in a CUDA build of torch without a GPU (downloads several GB)
# Each sets up what it needs in .venv on first use.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready-$(shell cat requirements.txt | sha256sum | cut -c1-12)

.PHONY: build demo test bench check variants variants-check sanitize clean
.DELETE_ON_ERROR:

$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "needs Python 3.11 or newer, as PYTHON=...")'
	@echo "setup: making .venv and installing requirements.txt (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements.txt
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
	@$(BIN)/python tools/sync_build.py --check
	@$(BIN)/python tools/check.py

variants: $(READY)
	@$(BIN)/python tools/build.py --all

variants-check: variants
	@$(BIN)/python tools/check_variants.py

sanitize: build
	@$(BIN)/python tools/sanitize.py $(SANITIZE)

clean:
	rm -rf build
