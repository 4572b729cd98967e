# Everything works from a bare checkout: each target first brings .venv up to the pins (.ci/prepare), wherever it stood.
PYTHON ?= python3
export PYTHON
BIN := .venv/bin

.PHONY: help prepare demo test test-gate test-all gpu check lint types boundaries docs dist clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

prepare: ## make .venv fit the pins, and install the package into it
	@.ci/prepare

demo: prepare ## train a GPT on four pipeline stages, three ways; prints a table, writes a picture and a page
	@$(BIN)/evenpipe demo --picture demo.png

# Several tests at a time, those of a file by one worker in their order; benchmarks measure times, so they are alone.
NONE_LEFT := 5# what pytest ends with when ARGS leave no tests
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
WITH_RELEASES = releases=$$(.ci/prepare --releases) && export EVENPIPE_MEGATRON_RELEASES="$$releases"

test: prepare ## run the tests; ARGS="-k bpipe" narrows them down
	@$(PYTEST) -m "not (benchmarks or gate or long or megatron_lm or releases)" $(ARGS)

test-gate: prepare ## these, Megatron-LM's scripts (MEGATRON_LM names checkouts), older megatron-core releases, examples, failures
	@$(WITH_RELEASES) && $(PYTEST) --durations=25 -m "not (benchmarks or long)" $(ARGS)

# OLDEST_TORCH=: not the runtime on the oldest torch that is declared. Pip does not find a build of it for CPUs
# everywhere, and the others are some GB.
OLDEST_TORCH ?= 1

test-all: prepare ## all, before a release: more sizes and models, the runtime on the oldest torch, and benchmarks
	@$(if $(MEGATRON_LM),,echo "Megatron-LM's scripts: not run, as MEGATRON_LM names no checkouts")
	@$(WITH_RELEASES) && \
	{ $(PYTEST) --hypothesis-profile=more --durations=25 $(ARGS) -m "not benchmarks" || [ $$? = $(NONE_LEFT) ]; } && \
	{ $(if $(OLDEST_TORCH),oldest=$$(.ci/prepare --oldest-torch) && PYTHONPATH="$$oldest" $(PYTEST) $(ARGS) tests/runtime || [ $$? = $(NONE_LEFT) ],echo "tests/runtime on the oldest torch: not run, as OLDEST_TORCH is empty"); } && \
	{ $(BIN)/python -m pytest $(ARGS) -m benchmarks || [ $$? = $(NONE_LEFT) ]; }

# A container's or a module's torch is its interpreter's, or on PYTHONPATH; .venv is not to see another's packages.
gpu: $(if $(SYSTEM),,prepare) ## measure what only GPUs can tell, in ten minutes, into docs/gpu.json and docs/gpu.md; SYSTEM=1: with the torch of PYTHON
	@$(if $(SYSTEM),beside=$$(.ci/prepare --system) && PYTHONPATH="$${PYTHONPATH:+$$PYTHONPATH:}$(CURDIR)/plugin:$$beside" $(PYTHON),env -u PYTHONPATH $(BIN)/python) -m benchmarks.gpu $(ARGS)

check: lint types boundaries ## what pre-commit runs: the three below

lint: prepare ## style (ruff)
	@$(BIN)/ruff check .

types: prepare ## types (mypy, strict; of the benchmarks without what torch leaves untyped)
	@$(BIN)/mypy
	@$(BIN)/mypy --allow-untyped-calls --no-warn-return-any --implicit-reexport --no-warn-unused-ignores benchmarks

boundaries: prepare ## which room may import which (import-linter)
	@$(BIN)/lint-imports

docs: prepare ## build the pages as a site into build/site, every link looked at; python -m http.server -d build/site shows it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: prepare ## build a release into build/dist: source archive and wheel, the same bytes from the same commit
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir build/dist .

clean: ## remove what these targets made
	rm -rf .venv build demo.png demo.html .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
