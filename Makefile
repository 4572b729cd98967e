# Everything works from a bare checkout: each target first brings .venv up to the pins (.ci/prepare), wherever it stood.
PYTHON ?= python3
export PYTHON
BIN := .venv/bin

.PHONY: help prepare demo test check lint types boundaries clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

prepare: ## make .venv fit the pins, and install the package into it
	@.ci/prepare

demo: prepare ## train a GPT on four pipeline stages, three ways; prints a table, writes a picture
	@$(BIN)/evenpipe demo --picture demo.png

test: ## run all tests; ARGS="-k bpipe" narrows them down
	@releases=$$(.ci/prepare --releases) && \
	EVENPIPE_MEGATRON_RELEASES="$$releases" $(BIN)/python -m pytest $(ARGS)

check: lint types boundaries ## what pre-commit runs: the three below

lint: prepare ## style (ruff)
	@$(BIN)/ruff check .

types: prepare ## types (mypy, strict)
	@$(BIN)/mypy

boundaries: prepare ## which room may import which (import-linter)
	@$(BIN)/lint-imports

clean: ## remove what these targets made
	rm -rf .venv build demo.png .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
