"""Fixtures shared by the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline import embedded


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """SmolLM2-135M-Instruct; `make install` has fetched it."""
    return embedded.require()
