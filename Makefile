PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test lint browser bench clean

# torch comes first and pinned: anything looser may pull a build for other hardware.
.venv/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e ".[demo]"
	@touch $@

install: .venv/installed
.venv/installed: .venv/base
	$(BIN)/pip install --quiet -c constraints.txt -e ".[demo,bench,dev]"
	$(BIN)/python -m forwardtune._compat.torchvision
	@touch $@

demo: .venv/base
	$(BIN)/forwardtune compare --preset digits

test: install lint browser
	$(BIN)/pytest -n 2 --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The report is also tested in a browser: Debian's, which root installs here if there is none.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -qq && apt-get install -qq -y chromium >/dev/null; } \
	  || echo "no chromium: the tests of the report in a browser will be skipped"

bench: install
	$(BIN)/python -m benchmarks.noise --json results/noise.json
	$(BIN)/python -m benchmarks.startup --json results/startup.json
	$(BIN)/python -m benchmarks.step --json results/step.json
	$(BIN)/python -m benchmarks.memory --json results/memory.json
	$(BIN)/python -m benchmarks.scaling --json results/scaling.json
	$(BIN)/python -m benchmarks.replay --json results/replay.json
	$(BIN)/python -m benchmarks.resume --json results/resume.json
	$(BIN)/python -m benchmarks.backpropagation --json results/backpropagation.json
	$(BIN)/python -m benchmarks.auto --json results/auto.json
	$(BIN)/python -m benchmarks.lines --json results/lines.json
	$(BIN)/python -m benchmarks.sweep --json results/sweep.json

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
