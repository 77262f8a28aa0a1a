PYTHON ?= python3
PORT   ?= 8000
MODEL  ?=
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: install serve test lint clean

install: $(VENV)/.run-ready

# The stamp files make a second `make serve` or `make test` install nothing.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing pinned dependencies (once) ..."
	$(PIP) install -c constraints.txt -e .
	$(BIN)/ridgeline pull --quiet
	@touch $@

$(VENV)/.test-ready: $(VENV)/.run-ready
	@echo "installing test dependencies (once) ..."
	$(PIP) install --upgrade "pip>=25.1"
	$(PIP) install -c constraints.txt --group dev
	@touch $@

serve: install
	@exec $(BIN)/ridgeline serve $(MODEL) --port $(PORT)

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build *.egg-info
