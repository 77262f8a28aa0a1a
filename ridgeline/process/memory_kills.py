"""How a child process ended, in words: among them that the kernel killed it because memory ran out.

The kernel tells neither the process nor its parent why it sends SIGKILL, but it counts such kills: for the machine in
/proc/vmstat, and for a container in its cgroup. A count that grew while the child ran is the only sign there is.
"""

from __future__ import annotations

import errno
import resource
import signal
from contextlib import suppress
from pathlib import Path

from ridgeline.process.platform import is_address_space_limited

OUT_OF_MEMORY = errno.ENOMEM         # the exit code of a child that had no memory left to say so
OUT_OF_THREADS = errno.EAGAIN        # and of one that could start no thread
NO_THREAD = "could start no further thread; raise `ulimit -u`, or `ulimit -v`"
_LESS = "use a smaller model, a smaller max_model_len or kv_cache_memory_bytes, or end other programs"
_COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))


def is_out_of_threads(error: BaseException) -> bool:
    """Python has no class of its own for it."""
    return isinstance(error, RuntimeError) and "start new thread" in str(error)


class OutOfMemoryKills:
    """Made before the child is started."""

    def __init__(self, counters: tuple[Path, ...] = _COUNTERS) -> None:
        self._counters = (*counters, *_own_cgroup()) if counters is _COUNTERS else counters
        self._before = self._counted()

    def how_it_ended(self, code: int) -> str:
        """For its exit code, as subprocess gives it."""
        if code == OUT_OF_MEMORY:
            return f"ran out of memory: {_LESS}"
        if code == OUT_OF_THREADS:
            return NO_THREAD
        if code >= 0:
            return f"ended with code {code}"
        number = -code
        name = next((each.name for each in signal.Signals if each == number), f"signal {number}")
        if number == signal.SIGKILL and self._counted() > self._before:
            return f"was killed by {name}, probably because the machine ran out of memory: {_LESS}"
        if number in (signal.SIGABRT, signal.SIGSEGV) and is_address_space_limited():        # what libraries do without memory
            return f"was killed by {name}, probably because `ulimit -v` leaves too little memory: {_LESS}"
        if number == signal.SIGBUS:
            return f"was killed by {name}: a file that it read, such as the model's, became shorter, or /dev/shm is full"
        if number in (signal.SIGXCPU, signal.SIGKILL) and resource.getrlimit(resource.RLIMIT_CPU)[0] != resource.RLIM_INFINITY:
            return f"was killed by {name}, probably by the limit on CPU time (`ulimit -t`)"
        return f"was killed by {name}"

    def _counted(self) -> int:
        """Processes killed so far, in all counters together."""
        total = 0
        for file in self._counters:
            with suppress(OSError, ValueError):
                total += sum(
                    int(value) for name, _, value in (line.partition(" ") for line in file.read_text().splitlines())
                    if name == "oom_kill"
                )
        return total


def _own_cgroup() -> tuple[Path, ...]:
    """The counter of this process's cgroup, where that is not the one that the container shows at the top."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/") and len(line) > 4:
                return (Path("/sys/fs/cgroup") / line[4:] / "memory.events",)
    return ()
