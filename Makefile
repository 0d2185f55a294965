# Each target makes what it needs on a fresh clone: `make demo` and `make test` are all a newcomer has to know.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test test-slow test-gpu bench lint format clean

help:
	@echo "make demo       train, conformalize, print the table and draw the picture (a minute or so with the installation)"
	@echo "make test       the test suite"
	@echo "make test-slow  the tests that take minutes"
	@echo "make test-gpu   the tests that need a CUDA device"
	@echo "make bench      what intervals cost, beside the dense way; prints and stores a table (some minutes)"
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff rewrite the layout"

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: $(INSTALLED)
	$(BIN)/fullcp demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu

bench: $(INSTALLED)
	$(BIN)/python benchmarks/prediction.py
	$(BIN)/python benchmarks/scaling_plot.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_output
