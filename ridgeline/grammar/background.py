"""Runs grammar compilation at a lower CPU priority than token generation."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path

NICE = 10                            # above the engine's own: a tenth of its CPU time beside it; all of it on an idle machine
LOWEST = 19                          # Linux has no lower priority
SLICE_NS = 100_000                   # time slice: how long a thread that wakes up may have to wait for the CPU
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}        # number of Linux's sched_setattr, which the C library does not wrap
# struct sched_attr: size, policy, flags, nice, priority, runtime (the time slice of ordinary processes), deadline, period.
_ATTRIBUTES = struct.Struct("<IIQiIQQQ")


def process_steps_back() -> None:
    """Lower the priority of this process and of those it starts. Where Linux groups processes by session (autogroup), a nice
    value counts only inside its group, so the group's own nice value is set as well."""
    nice = _lowered(0)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))
    _take_short_slices(nice)


def thread_steps_back() -> None:
    """Lower the priority of this thread alone; only Linux has a priority per thread."""
    if sys.platform == "linux":
        _take_short_slices(_lowered(threading.get_native_id()))


def _lowered(thread: int) -> int:
    """The new nice value. It counts from the process's own: a server that was started with `nice -n 15` may not go back to 10. A
    sandbox may allow no change: then grammars are compiled at the priority that there is."""
    nice = min(LOWEST, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICE)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, nice)
    return nice


def _take_short_slices(nice: int) -> None:
    """A low priority is not enough: Linux lets a running thread finish its time slice of 3 ms before a thread that wakes up gets
    the CPU, and many steps are shorter. From Linux 6.12 on a thread may ask for a shorter slice; elsewhere nothing happens."""
    number = _SET_ATTRIBUTES.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        asked = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, SLICE_NS, 0, 0)
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 0, ctypes.create_string_buffer(asked, len(asked)), 0)
