"""Settings that a process needs before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "found"), [({}, "ERROR"), ({"TORCH_CPP_LOG_LEVEL": "WARNING"}, "WARNING")])
def test_warnings_of_torchs_cpp_half_are_off_unless_asked_for(given: dict[str, str], found: str) -> None:
    """Some come with stack traces of a page. The variable counts only if it is set before torch is there."""
    names = "os.environ['TORCH_CPP_LOG_LEVEL'], os.environ['KINETO_LOG_LEVEL']"
    code = f"import os, sys, ridgeline; assert 'torch' not in sys.modules; print({names})"
    ours = ("TORCH_CPP_LOG_LEVEL", "KINETO_LOG_LEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | given
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [found, "6"]
