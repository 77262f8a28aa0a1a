"""Standard input, output and error that a program can rely on, also where it was started without them (`2>&-`).

A closed descriptor would be given to the next socket, which libraries would then write their messages into. What is said on
standard error is lost where it cannot be written (a full disk, a pipe without a reader): no program fails for that.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any

FULL_MILLISECONDS = 20               # of a wait for a pipe's reader …
MOST_FULL = 3                        # … and how many of them, one after the other, before the rest is lost


def open_missing() -> None:
    """Give the null device to those that are closed. Before anything else is opened."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    if sys.stderr is sys.__stderr__:                     # not where a program has put another in its place
        raw = _Lossy(2, "w", closefd=False)
        at_once = bool(getattr(sys.stderr, "write_through", False))      # python -u
        written: Any = raw if at_once else io.BufferedWriter(raw)
        encoding = None if sys.stderr is None else sys.stderr.encoding
        sys.stderr = io.TextIOWrapper(written, encoding, "backslashreplace", line_buffering=True, write_through=at_once)
        sys.__stderr__ = sys.stderr                      # type: ignore[misc]


class _Lossy(io.FileIO):
    """Loses what cannot be written. A full pipe that does not block (a supervisor may have made it so) gets a moment."""

    def write(self, data: Any) -> int:
        left, num_full = memoryview(data).cast("B"), 0
        while left and num_full <= MOST_FULL:
            try:
                written = super().write(left)
            except OSError:
                break
            if written is None:
                num_full += 1
                self._wait()
            else:
                left, num_full = left[written:], 0
        return memoryview(data).nbytes

    def _wait(self) -> None:
        asked = select.poll()
        asked.register(self.fileno(), select.POLLOUT)
        asked.poll(FULL_MILLISECONDS)


def say(text: str) -> bool:
    """Print a line at once. False: standard output takes nothing (a full disk, a closed pipe); from now on it goes nowhere."""
    try:
        print(text, flush=True)
    except OSError:
        discard_output()
        return False
    return True


def discard_output() -> None:
    """What is buffered is lost; else Python would try to write it once more when it ends, and fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
