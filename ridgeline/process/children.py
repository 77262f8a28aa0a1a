"""How this program starts processes of its own: with its own modules, and without its secrets.

A child finds modules where this process does, but never in the current directory, where another user may have left a file
called torch.py. Its environment holds only the settings that libraries read; API keys and tokens stay here. It has a
session of its own: Ctrl-C in the terminal reaches this process alone, which then ends its children in order.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ridgeline.process import spare_files
from ridgeline.process.head_start import byte_code_environment
from ridgeline.process.platform import current_directory

_NAMES = frozenset(
    "PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR TERM NO_COLOR VIRTUAL_ENV CC CXX LD_LIBRARY_PATH LD_PRELOAD "
    "PYTHONHASHSEED PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX PYTHONWARNINGS PYTHONUTF8 "
    "PYTHONIOENCODING PYTHONFAULTHANDLER HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_HOME HF_HUB_CACHE HUGGINGFACE_HUB_CACHE "
    "RAY_ADDRESS RAY_USE_TLS RAY_TLS_SERVER_CERT RAY_TLS_SERVER_KEY RAY_TLS_CA_CERT".split()     # paths of files, no secrets
)
_PREFIXES = tuple(
    "LC_ XDG_ RIDGELINE_ OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ MALLOC_ MIMALLOC_ CUDA_ NVIDIA_ NCCL_ GLOO_ TORCH_ TORCHINDUCTOR_ "
    "PYTORCH_ TRITON_".split()
)
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def start_child(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None, **popen: Any
) -> subprocess.Popen[bytes]:
    """`python -m module arguments…`; `environment` replaces the default environment of a child."""
    variables = child_environment() if environment is None else environment
    if "PYTHONPYCACHEPREFIX" not in variables:
        variables = {**variables, **byte_code_environment()}
    command = [sys.executable, "-P", "-m", module, *arguments]
    # Where the directory is gone, libraries would fail at their import: torch asks for it.
    options: dict[str, Any] = {
        "stdin": subprocess.DEVNULL, "start_new_session": True, "cwd": None if current_directory() else "/",
    } | popen
    with spare_files.lent():
        return subprocess.Popen(command, env={**variables, "PYTHONPATH": os.pathsep.join(module_path())}, **options)


def signal_main_thread(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """The kernel may give a process's signal to any of its threads. The others, the main thread among them, run on while that one
    handles it: a handler that reads their stacks can then fail in the middle."""
    if child.poll() is None:
        tgkill = getattr(ctypes.CDLL(None), "tgkill", None)          # of glibc 2.30 and later
        if tgkill is None or tgkill(child.pid, child.pid, int(number)) != 0:
            child.send_signal(number)


def child_environment() -> dict[str, str]:
    """Of this process's environment, what a child may know."""
    return {name: value for name, value in os.environ.items() if _may_know(name)}


def _may_know(name: str) -> bool:
    return name in _NAMES or (name.startswith(_PREFIXES) and not any(word in name for word in _SECRETS))


def module_path() -> list[str]:
    """Where this process finds modules, without the current directory. This package's own place comes last: it may be
    the current directory, and then nothing there hides an installed module."""
    here = current_directory()
    found = [path for path in sys.path if os.path.isabs(path) or (path and here)]
    found = [path for path in found if Path(path).resolve() != here]
    return [*found, str(Path(__file__).resolve().parents[2])]


def erase_variable(name: str) -> None:
    """Take a secret out of this process's environment for good. Linux shows the environment that a process was started with in
    /proc/PID/environ, to programs of the same user; a variable that was removed is still there, so its text is overwritten."""
    with suppress(OSError, ValueError, IndexError):
        # Fields 50 and 51 of the line: where that text begins and ends. A program's name, field 2, may hold blanks.
        numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(numbers[47]), int(numbers[48])
        text = Path("/proc/self/environ").read_bytes()
        if 0 < start < end and len(text) <= end - start:
            for found in re.finditer(rb"(?:\A|\0)" + re.escape(os.fsencode(name)) + rb"=([^\0]*)", text):
                ctypes.memset(start + found.start(1), 0, len(found[1]))
