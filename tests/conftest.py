"""Fixtures shared by the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """SmolLM2-135M-Instruct, from RIDGELINE_TEST_MODEL or the cache."""
    path = Path(os.environ.get("RIDGELINE_TEST_MODEL", Path.home() / ".cache/ridgeline/SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not path.is_file():
        pytest.skip(f"{path} is not there: set RIDGELINE_TEST_MODEL")
    return path
