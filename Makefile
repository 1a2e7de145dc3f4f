# Each target sets up .venv by itself, once; all that setting up says goes to stderr, so stdout is the command's own.
# MODEL=..., DEMO_ARGS=..., SERVE_ARGS=..., BENCH_ARGS=..., EXACT_ARGS=..., SIMULATE_ARGS=..., TEST_ARGS=... are handed on.
# PYTHON=... picks the interpreter.

PYTHON ?=
BENCH_ARGS ?= tree
BIN := .venv/bin
SETUP_INPUTS := pyproject.toml constraints.txt scripts/setup.sh

.PHONY: demo serve bench exact simulate test full lint check clean
.DEFAULT_GOAL := demo

demo: .venv/ready-server
	@$(BIN)/hicache demo $(MODEL) $(DEMO_ARGS)

serve: .venv/ready-server
	@$(BIN)/hicache serve $(MODEL) $(SERVE_ARGS)

bench: .venv/ready-server
	@$(BIN)/hicache bench $(BENCH_ARGS)

exact: .venv/ready-server
	@$(BIN)/hicache bench exact $(EXACT_ARGS)

simulate: .venv/ready-dev
	@$(BIN)/hicache simulate $(SIMULATE_ARGS)

test: .venv/ready-dev
	@$(BIN)/python -m pytest -n auto --dist loadfile $(TEST_ARGS)

full: .venv/ready-dev
	@$(BIN)/python -m pytest -n auto --dist loadfile --hypothesis-profile=full --timeout=3600 $(TEST_ARGS)

lint: .venv/ready-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports

check: lint test

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

.venv/ready-server: $(SETUP_INPUTS)
	@PYTHON='$(PYTHON)' sh scripts/setup.sh server $@

.venv/ready-dev: $(SETUP_INPUTS)
	@PYTHON='$(PYTHON)' sh scripts/setup.sh server,test,dev $@
