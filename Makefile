# A fresh machine needs two commands: `make run` and `make test`. Everything lands in .venv.
PYTHON ?= python3
STUDY ?= soap
SCALE ?= desk

BIN := .venv/bin
# A folder of data beside the checkout is used where there is one; see docs/guides/data-and-models.md.
ifneq ($(wildcard ../shared/data/README.md),)
export ASSAY_DATA ?= $(abspath ../shared/data)
endif

.PHONY: run test lint types contracts pytest docs report clean

run: .venv/has-all  ## the study STUDY at SCALE; a claim that fails is a finding, not an error of make
	@$(BIN)/assay run $(STUDY) --scale $(SCALE) || { code=$$?; [ $$code -eq 3 ]; }

test: lint types contracts pytest docs  ## everything that CI checks

lint: .venv/has-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m assay.catalog --check README.md

types: .venv/has-dev
	$(BIN)/mypy

contracts: .venv/has-dev
	$(BIN)/lint-imports

pytest: .venv/has-dev
	$(BIN)/pytest -n 2 --dist loadgroup --durations=15

docs: .venv/has-dev
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

report: .venv/has-all
	$(BIN)/assay report

clean:
	rm -rf .venv docs/_build docs/methods docs/results.md build dist

.venv/has-%: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[$*]'
	@touch $@

.venv/bin/pip:
	$(PYTHON) -m venv .venv
