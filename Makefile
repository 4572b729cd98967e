# Everything works from a bare checkout: each target first brings .venv up to the pins (.ci/prepare), wherever it stood.
PYTHON ?= python3
export PYTHON
BIN := .venv/bin

.PHONY: help prepare demo test test-rest test-all gpu check lint types boundaries clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

prepare: ## make .venv fit the pins, and install the package into it
	@.ci/prepare

demo: prepare ## train a GPT on four pipeline stages, three ways; prints a table, writes a picture and a page
	@$(BIN)/evenpipe demo --picture demo.png

# Several tests at a time, those of a file by one worker in their order; benchmarks measure times, so they are alone.
NONE_LEFT := 5# what pytest ends with when ARGS leave no tests
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test: prepare ## run the tests; ARGS="-k bpipe" narrows them down
	@$(PYTEST) -m "not benchmarks and not megatron_lm and not releases and not long" $(ARGS)

test-rest: ## the others: what takes long, older megatron-core releases, Megatron-LM's scripts (MEGATRON_LM), benchmarks
	@releases=$$(.ci/prepare --releases) && \
	export EVENPIPE_MEGATRON_RELEASES="$$releases" && \
	{ $(PYTEST) --durations=25 $(ARGS) -m "(megatron_lm or releases or long) and not benchmarks" || [ $$? = $(NONE_LEFT) ]; } && \
	{ $(BIN)/python -m pytest $(ARGS) -m benchmarks || [ $$? = $(NONE_LEFT) ]; }

test-all: test test-rest ## all of them

gpu: prepare ## measure what only GPUs can tell, in ten minutes; writes docs/gpu.json and the table in docs/gpu.md
	@$(BIN)/python -m benchmarks.gpu $(ARGS)

check: lint types boundaries ## what pre-commit runs: the three below

lint: prepare ## style (ruff)
	@$(BIN)/ruff check .

types: prepare ## types (mypy, strict; of the benchmarks without what torch leaves untyped)
	@$(BIN)/mypy
	@$(BIN)/mypy --allow-untyped-calls --no-warn-return-any --implicit-reexport --no-warn-unused-ignores benchmarks

boundaries: prepare ## which room may import which (import-linter)
	@$(BIN)/lint-imports

clean: ## remove what these targets made
	rm -rf .venv build demo.png demo.html .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
