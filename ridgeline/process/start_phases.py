"""Where the time from the start of the process goes, by phase. The phases and "other" always sum to the wall clock.

    with startup.phase("weights"):
        load_weights(...)
    startup.report()                 # {"imports": 2.1, "weights": 1.3, …, "other": 0.2}, in seconds

A phase within a phase is counted once, as the inner one. Knows the system's clock and nothing else; no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OTHER = "other"

_seconds: dict[str, float] = {}      # by phase, without the phases inside it; in the order in which they began
_open: list[float] = []              # per open phase: seconds that phases inside it have taken so far


def since_start() -> float:
    """Seconds since this process was started, its interpreter's own start included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - _started()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Everything inside belongs to `name`; a phase that comes again is added to."""
    _seconds.setdefault(name, 0.0)
    _open.append(0.0)
    began = time.perf_counter()
    try:
        yield
    finally:
        took = time.perf_counter() - began
        _seconds[name] += took - _open.pop()
        if _open:
            _open[-1] += took


def until_now(name: str) -> None:
    """Everything that no phase has claimed since the process started belongs to `name`: the interpreter and imports."""
    if _open:
        raise AssertionError("until_now inside a phase")
    _seconds[name] = _seconds.get(name, 0.0) + max(0.0, since_start() - sum(_seconds.values()))


def report() -> dict[str, float]:
    """Seconds by phase, and what is left of the wall clock since the process started as "other"."""
    return {**_seconds, OTHER: max(0.0, since_start() - sum(_seconds.values()))}


def table(seconds: dict[str, float]) -> str:
    """A report as lines of text, the sum last."""
    width = max(len(name) for name in (*seconds, "total"))
    rows = [*seconds.items(), ("total", sum(seconds.values()))]
    return "\n".join(f"{name:<{width}}  {value:7.3f} s" for name, value in rows)


def _started() -> float:
    """When the process was started, on the clock that counts from the machine's start."""
    # The name in brackets may hold spaces and brackets itself: fields are counted from its end on.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
