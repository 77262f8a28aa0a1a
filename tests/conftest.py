"""Fixtures shared by the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline import embedded


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
