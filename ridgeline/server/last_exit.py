"""Ends the server's process at a deadline, whatever still runs in it.

Python waits for its threads when it ends, and a thread may hang in a library or wait for a child that does not answer. An orderly
end is tried first, and this waits no longer for it than was promised. Children of the process end with it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ridgeline.process.log import get_logger

logger = get_logger("server")

LONGEST_SELECT = 3_600.0             # seconds; the system call refuses 10^10, which is a time that an operator may give


class LastExit:
    """`within()` may be called in a signal handler: it only writes to a pipe, and takes no lock that the handler may have
    interrupted."""

    def __init__(self, leave: Callable[[int], object] = os._exit) -> None:
        self._leave = leave
        self._deadline = float("inf")                    # time.monotonic()
        self._read, self._write = os.pipe()
        threading.Thread(target=self._wait, name="last-exit", daemon=True).start()

    def within(self, seconds: float) -> None:
        """From now. A later call may only shorten it."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)
        os.write(self._write, b"x")

    def _wait(self) -> None:
        while (left := self._deadline - time.monotonic()) > 0:
            if select.select([self._read], [], [], None if left == float("inf") else min(left, LONGEST_SELECT))[0]:
                os.read(self._read, 64)
        with suppress(Exception):                        # also when standard error is gone
            logger.warning("some work did not end in time; the process ends without it")
            sys.stderr.flush()
        for child in own_children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._leave(0)


def own_children() -> list[int]:
    """Processes that this one has started; none where the system does not tell."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found
