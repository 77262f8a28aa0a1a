"""Watches ranks from a thread of rank 0, which may be waiting for one of them in the middle of a step.

Every rank says once a second that it lives, how many steps it has run, and how long it has waited for others. A rank that is
silent is ended: then the others' connections to it break, and rank 0 can say which it was. Where broken connections are not
noticed (NCCL), `give_up` ends what waits for it. A rank that all others wait for is named in the log.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import zmq

from ridgeline.process.log import get_logger

logger = get_logger("ranks")

BEAT_SECONDS = 1.0
SILENT_SECONDS = 10.0                # after that, a rank counts as hung
_LOOK_SECONDS = 0.25
_NOTICE_SECONDS = 2.0                # for rank 0 to notice by itself that a rank has ended
_WINDOW_SECONDS = 5.0                # over which waiting is compared; one alone may be a pause, of which there are many kinds
_AGAIN_SECONDS = 60.0                # between two lines about the same slow rank


class Process(Protocol):
    """What is known of a rank's process, wherever it runs."""

    returncode: int | None

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def straggler(waited: Mapping[int, float], seconds: float) -> int | None:
    """The rank that the others wait for: most of them wait for more than half of the time longer than it does, which itself waits
    now and then where a machine is busy. None: they keep step, or are idle."""
    if len(waited) < 2:
        return None
    slowest = min(waited, key=lambda rank: waited[rank])
    others = [value for rank, value in waited.items() if rank != slowest]
    return slowest if statistics.median(others) - waited[slowest] > 0.5 * seconds else None


class SlowRanks:
    """Finds the rank that the others wait for in two windows in a row."""

    def __init__(self) -> None:
        self._since = -_WINDOW_SECONDS                   # of the window's begin, and what each rank had waited then
        self._before: dict[int, float] = {}
        self._slow: int | None = None                    # in the last window
        self._named: dict[int, float] = {}               # rank -> when

    def look(self, waited: Mapping[int, float], now: float) -> int | None:
        """`waited`: seconds of each rank so far. The rank that is to be named now."""
        seconds = now - self._since
        if seconds < _WINDOW_SECONDS:
            return None
        before, slow = self._before, None
        if before.keys() == waited.keys():
            slow = straggler({rank: waited[rank] - before[rank] for rank in waited}, seconds)
        again = slow is not None and slow == self._slow
        self._since, self._before, self._slow = now, dict(waited), slow
        if slow is None or not again or now - self._named.get(slow, -_AGAIN_SECONDS) < _AGAIN_SECONDS:
            return None
        self._named[slow] = now
        return slow


class RankWatch:
    def __init__(
        self, beats: zmq.Socket[bytes], processes: Mapping[int, Process], waited: Callable[[], float], give_up: Callable[[], None]
    ) -> None:
        """`beats`: what ranks say; only this thread reads it. `waited`: seconds that rank 0 has waited so far."""
        self.hung: dict[int, str] = {}                   # rank -> why it was ended
        self.lost = False                                # a rank has ended
        self._beats, self._processes, self._waited, self._give_up = beats, processes, waited, give_up
        self._silent = dict.fromkeys(processes, 0.0)     # seconds since each rank was heard
        self._said: dict[int, float] = {}                # seconds that each has waited so far
        self._slow = SlowRanks()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def quiet(self) -> list[int]:
        """Ranks that have missed two beats."""
        return [rank for rank, seconds in self._silent.items() if seconds > 2.5 * BEAT_SECONDS]

    def end(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.is_set():
            if self._beats.poll(int(1000 * _LOOK_SECONDS)):
                self._hear(json.loads(self._beats.recv()))
            now = time.monotonic()
            self._look(min(now - last, 2 * _LOOK_SECONDS))       # more: this process itself was stopped for a while
            last = now
            if (slow := self._slow.look({0: self._waited(), **self._said}, now)) is not None:
                logger.warning("rank %d is slow: the others wait for it most of the time", slow)

    def _hear(self, said: Any) -> None:
        rank, _, waited = said
        self._silent[rank], self._said[rank] = 0.0, waited

    def _look(self, seconds: float) -> None:
        for rank, process in self._processes.items():
            self._silent[rank] += seconds
            if process.poll() is not None:
                self._lose()
            elif self._silent[rank] > SILENT_SECONDS and rank not in self.hung:
                self.hung[rank] = f"rank {rank} gave no sign of life for {SILENT_SECONDS:.0f} s and was ended"
                logger.error("%s", self.hung[rank])
                process.kill()

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            if not self._stop.wait(_NOTICE_SECONDS):
                self._give_up()
