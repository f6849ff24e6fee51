PYTHON ?= python3
STAMP := .venv/stamp
IN_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"

.PHONY: test demo bench plans exhaustive format clean

test: $(STAMP)
	$(IN_VENV) scripts/check
	$(IN_VENV) scripts/test

demo: $(STAMP)
	$(IN_VENV) scripts/demo

bench: $(STAMP)
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.search_accuracy
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.loop
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.forecast_accuracy
	.venv/bin/python -m benchmarks.plan_cost
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.tokens --cost
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.objective
	OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.growth

plans: $(STAMP)
	.venv/bin/python -m benchmarks.stock_configs

exhaustive: $(STAMP)
	$(IN_VENV) scripts/test -m exhaustive

format: $(STAMP)
	.venv/bin/ruff format
	.venv/bin/ruff check --fix

clean:
	rm -rf .venv demo_output build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The bound on torch picks a CPU wheel where one is at hand.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install 'torch>=2.9,<2.14' -e '.[dev,plot]'
	touch $@
