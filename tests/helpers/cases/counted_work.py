"""Work that is counted, not timed: lines of the package that ran, and bytes that they allocated.

Both are the same on every machine and beside any load. Bytes show what lines hide: a text that is copied once for every piece of
it. What a library does in a compiled language without allocating is not seen; where that matters, a slow test takes the time.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import ridgeline

PACKAGE = str(Path(ridgeline.__file__).parent)


class Work(NamedTuple):
    lines: int
    allocated: int                   # bytes: of every line the most that it held at once, added up


def work_of(does: Callable[[], object]) -> Work:
    """What a call takes in this thread; lines count in files of the package only."""
    lines = allocated = held = 0

    def line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines, allocated, held
        now, peak = tracemalloc.get_traced_memory()
        allocated += peak - held
        tracemalloc.reset_peak()
        held = now
        lines += event == "line"
        return line

    def call(frame: FrameType, event: str, arg: object) -> Any:
        return line if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    tracemalloc.start()
    sys.settrace(call)
    try:
        does()
    finally:
        sys.settrace(before)
        allocated += tracemalloc.get_traced_memory()[1] - held
        tracemalloc.stop()
    return Work(lines, allocated)


def is_linear(work: Callable[[int], object], size: int, times: int = 8) -> tuple[bool, Work, Work]:
    """Whether so many times the size takes no more than half as much again as that much work, and what both took."""
    few, many = work_of(lambda: work(size)), work_of(lambda: work(times * size))
    return all(more <= 1.5 * times * less for less, more in zip(few, many, strict=True)), few, many
