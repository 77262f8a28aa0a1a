"""Whoever compiles grammars comes behind whoever generates, for the processors' time."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path

NICE = 10                            # a tenth of what whoever generates gets; all, where nobody does
SLICE_NS = 100_000                   # how long it keeps a processor from somebody who has just got something to do
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}        # Linux's sched_setattr, for which the C library has no name yet
# Size, policy, flags, nice value, priority, and three times of which ordinary processes have the first: their slice.
_ATTRIBUTES = struct.Struct("<IIQiIQQQ")


def process_steps_back() -> None:
    """This process and those it starts. Where Linux groups processes by session, and this one has a session of its own, a
    nice value counts only inside the group, and the group's own is what others notice."""
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICE))
    _take_short_slices()


def thread_steps_back() -> None:
    """This thread alone: on Linux it has a priority of its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        _take_short_slices()


def _take_short_slices() -> None:
    """A small share is not enough. Linux lets who runs finish its slice, 3 ms of them, before who wakes gets the processor,
    and that is longer than many a step. From 6.12 on a process may ask for a shorter one; elsewhere nothing happens."""
    number = _SET_ATTRIBUTES.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        asked = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, NICE, 0, SLICE_NS, 0, 0)
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).syscall(number, 0, ctypes.create_string_buffer(asked, len(asked)), 0)
