"""What a process finds out about its machine and sets before torch is imported."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from ridgeline.process import platform


@pytest.mark.parametrize(("given", "found"), [({}, "ERROR"), ({"TORCH_CPP_LOG_LEVEL": "WARNING"}, "WARNING")])
def test_warnings_of_torchs_cpp_half_are_off_unless_asked_for(given: dict[str, str], found: str) -> None:
    """Some come with stack traces of a page. The variable counts only if it is set before torch is there."""
    names = "os.environ['TORCH_CPP_LOG_LEVEL'], os.environ['KINETO_LOG_LEVEL']"
    code = f"import os, sys, ridgeline; assert 'torch' not in sys.modules; print({names})"
    ours = ("TORCH_CPP_LOG_LEVEL", "KINETO_LOG_LEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | given
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [found, "6"]


@pytest.mark.parametrize(("cpuinfo", "name"), [
    ("processor\t: 0\nmodel name\t: Intel(R) Xeon(R) @ 2.50GHz\nflags\t\t: fpu avx2\n", "Intel(R) Xeon(R) @ 2.50GHz"),
    ("processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nprocessor\t: 1\nCPU part\t: 0xd08\n",
     "Arm Neoverse-N1"),
    ("processor\t: 0\nCPU implementer\t: 0xc0\nCPU part\t: 0xac3\n", "aarch64 0xc0 0xac3"),
    ("", "aarch64"),
])
def test_two_kinds_of_processor_have_two_names(monkeypatch: pytest.MonkeyPatch, cpuinfo: str, name: str) -> None:
    """Measured peaks are kept under the name. aarch64 has no line `model name`."""
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO(cpuinfo))
    monkeypatch.setattr(platform._platform, "machine", lambda: "aarch64")
    assert platform.cpu_name() == name
