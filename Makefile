PYTHON ?= python3
PORT   ?= 8000
MODEL  ?=
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: install serve test lint clean

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

# Tiny models on few cores: threads would only wait for each other.
test: lint
	$(BIN)/ridgeline build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build *.egg-info
