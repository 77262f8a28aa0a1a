"""Ends a child process soon after its parent is gone, whatever the child is doing.

Loading a model would keep an orphan alive for many seconds, with all its memory. A thread ends it, after a moment in which it may
clean up. While it loads, the kernel can end it at once: imports and large reads hold Python's lock, and no thread could act.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 0.2                   # between two looks
GRACE_SECONDS = 0.4                  # for the child to notice by itself and to end in order
_PR_SET_PDEATHSIG = 1                # of Linux's prctl: the signal that this process gets when the thread that started it ends


def end_with_parent(parent: int, clean_up: Callable[[], None] = lambda: None) -> None:
    """From now on this process ends when its parent is not `parent` any more."""
    threading.Thread(target=_watch, args=(parent, clean_up), name="parent", daemon=True).start()


def end_at_once() -> None:
    """Until `may_clean_up`, have the kernel end this process with the thread that started it. Only where that thread lives as
    long as the parent."""
    _signal_at_parents_death(signal.SIGKILL)


def may_clean_up() -> None:
    """The long calls are over: from now on threads run in time."""
    _signal_at_parents_death(0)


def _signal_at_parents_death(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)


def _watch(parent: int, clean_up: Callable[[], None]) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    time.sleep(GRACE_SECONDS)
    try:
        clean_up()
    finally:
        os._exit(0)
