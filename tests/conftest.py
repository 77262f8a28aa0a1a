"""Fixtures shared by the tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from reliability_rows import EVERY_COMMIT

from ridgeline.process import embedded

# A shell without a terminal starts background processes with Ctrl-C ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)      # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests of the rows that every commit must pass get the marker that `make test-reliability` selects."""
    for item in items:
        rows = {promise[:4] for mark in item.iter_markers("reliability") for promise in mark.args}
        if rows & EVERY_COMMIT and item.get_closest_marker("slow") is None:
            item.add_marker("every_commit")


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """SmolLM2-135M-Instruct; `make install` has fetched it."""
    return embedded.require()


@pytest.fixture(autouse=True)
def usual_kernels() -> Iterator[None]:
    """An engine with kernels=reference switches them for the whole process: the next test starts as if it were alone."""
    yield
    if registry := sys.modules.get("ridgeline.ops.registry"):
        registry.set_kernels("auto")
