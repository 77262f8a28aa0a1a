"""What the operating system did to this thread: CPU time, time in the run queue, page faults. A few microseconds a look.

Time in the run queue is time in which the thread could have worked, and other programs (or too many threads) had the cores.
"""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

_WHO = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class ThreadTimes(NamedTuple):
    """Sums since the thread began."""

    computing: float = 0.0           # seconds on a core
    waiting: float = 0.0             # seconds in the run queue; always 0 where the kernel does not say
    faults: int = 0                  # pages mapped
    read_faults: int = 0             # pages read from a disk

    def since(self, before: ThreadTimes) -> ThreadTimes:
        return ThreadTimes(
            self.computing - before.computing, self.waiting - before.waiting, self.faults - before.faults,
            self.read_faults - before.read_faults,
        )


class ThreadClock:
    """Of the thread that makes it."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:                                  # no such kernel
            self._file = -1

    def read(self) -> ThreadTimes:
        used = resource.getrusage(_WHO)
        return ThreadTimes(used.ru_utime + used.ru_stime, self.waiting(), used.ru_minflt, used.ru_majflt)

    def waiting(self) -> float:
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) * 1e-9
        except (OSError, IndexError, ValueError):
            return 0.0

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
