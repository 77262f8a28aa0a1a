PYTHON ?= python3
PORT   ?= 8000
MODEL  ?=
ARGS   ?=
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Byte code is written by the first process that imports a module: pip would compile 17,000 files, in one thread, of which a tenth
# is ever imported. Where Python writes none, Ridgeline keeps it in its cache (ridgeline/process/head_start.py).
INSTALL := $(PIP) install --no-compile --constraint constraints.txt

# What needs a GPU to mean anything: kernels on the device, greedy tokens and laws on it, memory, sampling.
GPU_TESTS := tests/ops/test_ops.py tests/runner/test_sampler.py tests/models/test_families.py tests/engine/test_laws.py \
    tests/ops/linear/test_linear_kernels.py tests/ops/linear/test_gemv_ring.py tests/ops/linear/test_gemm_ring.py tests/ops/linear/test_gemm_wide.py tests/ops/linear/test_gemm_gated.py tests/ops/test_attention_gpu_shapes.py tests/ops/test_draft_attention.py \
    tests/ops/packed tests/ops/quantised tests/models/test_packed_scheme.py tests/models/test_fp8.py tests/models/checkpoints/test_upload.py tests/ops/test_kernel_prefill_hopper.py tests/runner/test_shared_prefix.py tests/runner/test_gpu_engine.py tests/runner/test_gpu_embedded.py tests/quantize/test_gpu_scales.py
# These compare what the device holds with a prediction, or take all of it, so no other program may use it.
GPU_TESTS_ALONE := tests/runner/test_gpu_memory.py tests/runner/test_gpu_out_of_memory.py tests/runner/test_gpu_ranks.py

.PHONY: help install serve chat test tests test-all test-reliability test-gpu lint style types docs clean
.DEFAULT_GOAL := install

help:
	@echo "make serve             the server on http://127.0.0.1:8000; PORT=, MODEL=path or ARGS='--max-model-len 4096' change it"
	@echo "make chat              talk to a model in the terminal; MODEL=path, ARGS='--system ...'"
	@echo "make install           dependencies into .venv, the CPU kernels, the embedded model"
	@echo "make test              lint, types, import contracts, tests"
	@echo "make test-all          the slow tests, too"
	@echo "make test-reliability  the tests of docs/reliability.md that every commit must pass"
	@echo "make test-gpu          the tests that need a GPU, with the Python and torch of this machine"
	@echo "make docs              write the generated pages of docs/ again"
	@echo "make clean             remove .venv and build outputs"

install: $(VENV)/.run-ready

# The stamp files make a second `make serve` or `make test` install nothing.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing pinned dependencies (once; a few minutes) ..."
	$(INSTALL) --editable .
	@echo "compiling the CPU kernels ..."
	@# Without a C compiler everything works, more slowly: the line that says so is enough.
	-@$(BIN)/ridgeline build
	@# Byte code, which Python does not write itself where PYTHONDONTWRITEBYTECODE is set: a start would compile 400 files.
	@$(BIN)/python -m compileall -q ridgeline
	@echo "fetching the embedded model (98 MB, once) ..."
	@$(BIN)/ridgeline pull --quiet
	@touch $@

$(VENV)/.test-ready: $(VENV)/.run-ready
	@echo "installing test dependencies (once; a few minutes) ..."
	$(PIP) install "pip>=25.1"
	$(INSTALL) --group dev
	@# Once, before the tests start processes that would each compile the same files.
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c \
	    "import hypothesis, pytest, ridgeline.engine.core.loop, ridgeline.server.app, transformers, triton.experimental.gluon, xgrammar"
	@touch $@

serve: install
	@exec $(BIN)/ridgeline serve $(MODEL) --port $(PORT) $(ARGS)

chat: install
	@exec $(BIN)/ridgeline chat $(MODEL) $(ARGS)

lint: style types

style: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(VENV)/.test-ready
	$(BIN)/mypy

# What takes seconds comes first. mypy has one thread, so it runs beside the tests; make waits for both.
test: style
	$(BIN)/ridgeline build
	@$(MAKE) --no-print-directory -j2 types tests

# The models of the tests are tiny: processes with one thread each, three on two cores (tests/conftest.py). Byte code is written: pytest rewrites every
# assertion, in every process that it starts.
tests: $(VENV)/.test-ready
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n logical --dist worksteal

# The slow tests run one after the other: many measure a time or a rate, and need an otherwise idle machine.
test-all: test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --durations 25

# The rows of docs/reliability.md that every commit must pass; `make test` runs them, too. Five minutes at most.
test-reliability: $(VENV)/.test-ready
	OMP_NUM_THREADS=1 timeout 300 $(BIN)/python -m pytest -n logical --dist worksteal -m every_commit

# Uses the Python and torch of the machine and installs nothing. Most of the time is kernel compilation, which pytest-xdist
# spreads over processes where it is installed.
test-gpu: SPREAD = $(shell $(PYTHON) -c "import xdist" 2>/dev/null && echo "-n 8 --dist worksteal")
test-gpu:
	$(PYTHON) -c "import torch; assert torch.cuda.is_available(), 'torch sees no GPU here'"
	$(PYTHON) -m pytest -q $(SPREAD) $(GPU_TESTS)
	$(PYTHON) -m pytest -q $(GPU_TESTS_ALONE)
	$(PYTHON) scripts/record_verified.py $(GPU_TESTS) $(GPU_TESTS_ALONE)

# The generated pages; tests compare them with what the scripts would write.
docs: install
	$(BIN)/python scripts/make_file_map.py --write
	$(BIN)/python scripts/make_options_page.py --write
	$(BIN)/python scripts/make_models_page.py --write
	$(BIN)/python scripts/make_reliability_page.py --write
	$(BIN)/python scripts/make_precision_tables.py --write
	$(BIN)/python scripts/make_quantize_tables.py --write

clean:
	rm -rf $(VENV) build *.egg-info
