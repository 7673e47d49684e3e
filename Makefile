# Everything runs in .venv, made on first use. `make help` lists the commands.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow wheel-test bench docs lint format clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

$(BIN)/dforce: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(BIN)/pytest: $(BIN)/dforce
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(BIN)/dforce  ## set up, let a pretrained model plan through a maze; a table, figures, an animation and a report
	$(BIN)/dforce eval maze2d-medium --pretrained --episodes 16
	@echo "Look at runs/maze2d-medium-pretrained/report.html (the animation is figures/episode.gif beside it)."
	@echo "Train one from scratch: .venv/bin/dforce train maze2d-umaze && .venv/bin/dforce eval runs/maze2d-umaze"

test: $(BIN)/pytest lint  ## set up, lint, check types and run the tests (under 12 minutes on two cores)
	$(BIN)/pytest

test-slow: $(BIN)/pytest  ## the tests that take minutes each: scores of the pretrained models, the wheel, resumed runs
	$(BIN)/pytest -m slow

wheel-test: $(BIN)/pytest  ## build wheel and sdist, install the wheel in a new environment, follow the README (part of test-slow)
	$(BIN)/pytest -m slow -n 0 -v tests/engine/test_wheel.py

$(BIN)/zensical: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

docs: $(BIN)/zensical  ## build the documentation, with search and API reference, into site/
	$(BIN)/zensical build --clean --strict
	@echo "Open site/index.html, or look at it while writing: $(BIN)/zensical serve"

bench: $(BIN)/dforce  ## speed, as ratios within one run
	$(BIN)/python benchmarks/run.py

lint: $(BIN)/pytest  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(BIN)/pytest  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
