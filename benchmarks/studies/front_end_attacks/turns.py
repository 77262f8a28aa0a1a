"""`ridgeline` with a watch on its event loop: how long the loop's turns hold the processor.

    python benchmarks/studies/front_end_attacks/turns.py FILE serve MODEL …

A turn is what the loop does between two looks at its sockets. Processor time is counted, not seconds, so other programs on the
machine do not matter. FILE gets a line of JSON for every turn of 10 ms or more: the loop's own processor time, that of the whole
process meanwhile (threads that hold Python's lock are part of it), that of garbage collections, the time in line for a core and
that of neither (it waited for Python's lock), the callbacks that ran, and the longest of them. Needs asyncio's own loop, and a
`ridgeline` on the path.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

LONG_SECONDS = 0.01


class Watch:
    """Of one loop."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._began = (0.0, 0.0, 0.0, 0.0)               # see _now()
        self._waits = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._collection_began = 0.0
        self._collecting = 0.0
        self._callbacks = 0
        self._longest: tuple[float, Any] = (0.0, "")

    def begin_turn(self) -> None:
        self._callbacks, self._collecting, self._longest = 0, 0.0, (0.0, "")
        self._began = self._now()

    def _now(self) -> tuple[float, float, float, float]:
        """Processor time of the thread and of the process, the thread's time in line for a core, and the time."""
        waited = int(os.pread(self._waits, 100, 0).split()[1]) / 1e9
        return time.thread_time(), time.process_time(), waited, time.monotonic()

    def end_turn(self) -> None:
        own, whole, waited, took = (now - began for now, began in zip(self._now(), self._began, strict=True))
        if max(own, whole, took) < LONG_SECONDS or not self._began[0]:
            return
        longest, callback = self._longest
        row = {"at": time.monotonic(), "own_ms": own, "process_ms": whole, "gc_ms": self._collecting, "longest_ms": longest,
               "waited_ms": waited, "blocked_ms": took - own - waited}
        row = {name: round(value if name == "at" else 1000 * value, 1) for name, value in row.items()}
        self._file.write(json.dumps({**row, "callbacks": self._callbacks, "longest": repr(callback)[:200]}) + "\n")
        self._file.flush()

    def run(self, run: Callable[[Any], None], handle: Any) -> None:
        callback, before = (handle._callback, handle._args), time.thread_time()
        run(handle)
        self._callbacks += 1
        if (seconds := time.thread_time() - before) > self._longest[0]:
            self._longest = seconds, callback

    def collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._collection_began = time.thread_time()
        else:
            self._collecting += time.thread_time() - self._collection_began


def watch_loops(file: TextIO) -> None:
    watch, run, make = Watch(file), asyncio.Handle._run, asyncio.SelectorEventLoop.__init__
    gc.callbacks.append(watch.collection)

    def watched_run(handle: asyncio.Handle) -> None:
        watch.run(run, handle)

    def watched_make(loop: Any, selector: Any = None) -> None:
        make(loop, selector)
        select = loop._selector.select

        def watched_select(timeout: float | None = None) -> Any:
            watch.end_turn()
            found = select(timeout)
            watch.begin_turn()
            return found

        loop._selector.select = watched_select

    asyncio.Handle._run = watched_run                    # type: ignore[method-assign]
    asyncio.SelectorEventLoop.__init__ = watched_make    # type: ignore[method-assign, assignment]


def main() -> None:
    path, *arguments = sys.argv[1:]
    from ridgeline.__main__ import main as ridgeline

    watch_loops(Path(path).open("a"))
    sys.argv[1:] = arguments
    raise SystemExit(ridgeline())


if __name__ == "__main__":
    main()
