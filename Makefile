PYTHON ?= python3
PORT   ?= 8000
MODEL  ?=
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# What needs a GPU to mean anything: kernels on the device, greedy tokens and laws on it, memory, sampling.
GPU_TESTS := tests/ops/test_ops.py tests/runner/test_sampler.py tests/models/test_families.py tests/engine/test_laws.py \
    tests/ops/test_linear_kernels.py tests/ops/test_gemv_ring.py tests/ops/test_gemm_ring.py tests/ops/test_gemm_wide.py tests/ops/test_gemm_gated.py tests/ops/test_attention_gpu_shapes.py \
    tests/ops/test_kernel_prefill_hopper.py tests/runner/test_shared_prefix.py tests/runner/test_gpu_engine.py tests/runner/test_gpu_embedded.py
# These compare what the device holds with a prediction, or take all of it, so nobody else may be on it.
GPU_TESTS_ALONE := tests/runner/test_gpu_memory.py tests/runner/test_gpu_out_of_memory.py

.PHONY: install serve test test-all test-reliability test-gpu lint clean

install: $(VENV)/.run-ready

# The stamp files make a second `make serve` or `make test` install nothing.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing pinned dependencies (once; a few minutes) ..."
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@# Without a C compiler everything works, more slowly: the line that says so is enough.
	-@$(BIN)/ridgeline build
	$(BIN)/ridgeline pull --quiet
	@touch $@

$(VENV)/.test-ready: $(VENV)/.run-ready
	@echo "installing test dependencies (once; a few minutes) ..."
	$(PIP) install --quiet "pip>=25.1"
	$(PIP) install --quiet --constraint constraints.txt --group dev
	@touch $@

serve: install
	@exec $(BIN)/ridgeline serve $(MODEL) --port $(PORT)

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tiny models on few cores: threads would only wait for each other, so every core has a process of its own.
test: lint
	$(BIN)/ridgeline build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

# The slow ones one after the other: many hold a time or a rate to a bar, and want a machine with nothing else to do.
test-all: test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --durations 25

# What every commit is held to of docs/reliability.md; `make test` has it too. It may take five minutes.
test-reliability: $(VENV)/.test-ready
	OMP_NUM_THREADS=1 timeout 300 $(BIN)/python -m pytest -n auto --dist worksteal -m reliability

# With the Python that is there and nothing installed: a machine with a GPU brings its own torch. Most of the time goes
# into compiling kernels, which several processes do side by side where pytest-xdist is there.
test-gpu: SPREAD = $(shell $(PYTHON) -c "import xdist" 2>/dev/null && echo "-n 8 --dist worksteal")
test-gpu:
	$(PYTHON) -c "import torch; assert torch.cuda.is_available(), 'torch sees no GPU here'"
	$(PYTHON) -m pytest -q $(SPREAD) $(GPU_TESTS)
	$(PYTHON) -m pytest -q $(GPU_TESTS_ALONE)
	$(PYTHON) scripts/record_verified.py $(GPU_TESTS) $(GPU_TESTS_ALONE)

clean:
	rm -rf $(VENV) build *.egg-info
