"""What this machine can do: devices, memory, and which dtypes are fast on its CPU. No torch."""

from __future__ import annotations

import functools
import os
import platform as _platform

import psutil


@functools.cache
def cpu_flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def cpu_fast_dtypes() -> tuple[str, ...]:
    """Dtypes whose matrix products run at full speed here. Without the instructions bf16 is over 100 times slower."""
    flags = cpu_flags()
    native_bf16 = bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})
    return ("float32", "bfloat16") if native_bf16 else ("float32",)


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return _platform.machine()


def available_memory() -> int:
    """Bytes the system can give without swapping."""
    return int(psutil.virtual_memory().available)
