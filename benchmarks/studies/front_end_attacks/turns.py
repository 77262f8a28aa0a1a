"""`ridgeline` with a watch on its event loop: how long the loop's turns hold the processor.

    python benchmarks/studies/front_end_attacks/turns.py FILE serve MODEL …

A turn is what the loop does between two looks at its sockets: a health check waits for all of it. Processor time is counted, not
seconds, so other programs on the machine do not matter. FILE gets a line of JSON for every turn of 10 ms or more: the loop's own
processor time, that of the whole process meanwhile (threads that hold Python's lock are part of it), the callbacks that ran, and
the longest of them. Needs asyncio's own loop.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

LONG_SECONDS = 0.01


class Watch:
    """Of one loop."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.callbacks = 0
        self.longest = 0.0
        self.longest_name = ""
        self._began = (0.0, 0.0)

    def ran(self, name: Any, seconds: float) -> None:
        self.callbacks += 1
        if seconds > self.longest:
            self.longest, self.longest_name = seconds, str(name)[:200]

    def end_turn(self) -> None:
        own, whole = time.thread_time() - self._began[0], time.process_time() - self._began[1]
        if max(own, whole) >= LONG_SECONDS and self._began[0]:
            row = {"at": time.monotonic(), "own_ms": round(1000 * own, 1), "process_ms": round(1000 * whole, 1),
                   "callbacks": self.callbacks, "longest_ms": round(1000 * self.longest, 1), "longest": self.longest_name}
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()

    def begin_turn(self) -> None:
        self.callbacks, self.longest = 0, 0.0
        self._began = (time.thread_time(), time.process_time())


def watch_loops(file: TextIO) -> None:
    watch = Watch(file)
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        callback, args, before = handle._callback, handle._args, time.thread_time()      # type: ignore[attr-defined]
        run(handle)
        seconds = time.thread_time() - before
        watch.callbacks += 1
        if seconds > watch.longest:
            watch.ran((callback, args), seconds)
            watch.callbacks -= 1

    asyncio.Handle._run = timed                          # type: ignore[method-assign]
    make = asyncio.SelectorEventLoop.__init__

    def made(loop: Any, selector: Any = None) -> None:
        make(loop, selector)
        select = loop._selector.select

        def watched(timeout: float | None = None) -> Any:
            watch.end_turn()
            found = select(timeout)
            watch.begin_turn()
            return found

        loop._selector.select = watched

    asyncio.SelectorEventLoop.__init__ = made            # type: ignore[method-assign, assignment]


def main() -> None:
    path, *arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from ridgeline.__main__ import main as ridgeline

    watch_loops(Path(path).open("a"))
    sys.argv[1:] = arguments
    raise SystemExit(ridgeline())


if __name__ == "__main__":
    main()
