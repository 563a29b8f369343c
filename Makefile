# The commands of the README. They share one virtual environment, .venv, which the first of them makes;
# it is installed again only when pyproject.toml changes.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install quickstart test check bench full clean

help:
	@echo "make quickstart   train a small language model with asynchronous GRPO and watch its reward climb"
	@echo "make test         the fast CPU test suite"
	@echo "make check        lint, types, layers and sizes"
	@echo "make bench        the benchmarks (JSON on standard output)"
	@echo "make full         every test, then whole runs: accuracy, chaos, kills; prints a JSON summary"

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 13); sys.exit(0 if ok else f"Python 3.11 to 3.13 is needed, $(PYTHON) is {sys.version.split()[0]}; choose one with: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once) ..."
	@$(PIP) --upgrade "pip>=25.1"
	@$(PIP) --editable . --group dev
	@touch $@

quickstart: $(STAMP)
	@$(BIN)/python examples/quickstart/quickstart.py $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

check: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/check.sh

bench: $(STAMP)
	@found="AREAL_VLLM_PYTHON=$$AREAL_VLLM_PYTHON"; \
	test -n "$$AREAL_VLLM_PYTHON" || found=$$(bash tests/components/install_servers.sh) || exit 1; \
	export "$$found"; \
	for script in benchmark/bench_*.py; do echo "# $$script" >&2; $(BIN)/python $$script || exit 1; done

full: $(STAMP)
	@$(BIN)/python -m tests.full --out outputs/full/summary.json $(ARGS)

clean:
	rm -rf build dist outputs .pytest_cache .mypy_cache .ruff_cache
