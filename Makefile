PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test lint bench clean

# torch comes first and pinned: anything looser may pull a build for other hardware.
install: .venv/installed
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e ".[demo,bench,dev]"
	@touch $@

demo: install
	$(BIN)/python -m examples.digits

test: install lint
	$(BIN)/pytest -n 2 --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/python -m benchmarks.noise --json results/noise.json
	$(BIN)/python -m benchmarks.step --json results/step.json
	$(BIN)/python -m benchmarks.memory --json results/memory.json
	$(BIN)/python -m benchmarks.scaling --json results/scaling.json
	$(BIN)/python -m benchmarks.replay --json results/replay.json

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
