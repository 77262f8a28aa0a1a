"""When an engine counts as hung, and how often it may be restarted.

Knows clocks and counts; engine/client/supervisor has the process and acts on these rules.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

LOADING_FACTOR = 5.0                 # a restart may take this many times as long as the first start …
LOADING_SECONDS = 60.0               # … and never less than this
FIRST_STEPS_FACTOR = 5.0             # the first steps of a process may compile kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """When an engine's process is restarted."""

    max_restarts: int = 0            # within `window`; after that many, the next death is final
    window: float = 600.0            # seconds
    silence: float = 60.0            # seconds without a finished step or a report of being idle; 0: no limit
    backoff: float = 0.5             # seconds before the second start in a row; doubles with each further one
    longest_backoff: float = 30.0


class Pulse:
    """How long ago the engine last showed progress."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._last = time.monotonic()
        self._steps = -1
        self._stepped = False

    def beat(self) -> None:
        """The engine sent something that only a running loop can send, such as tokens."""
        self._last = time.monotonic()

    def stepped(self) -> None:
        self._stepped = True
        self._last = time.monotonic()

    def turned(self, steps: int, busy: bool) -> None:
        """The loop reports itself. While it has work, that counts only if steps were finished since."""
        if not busy or steps != self._steps:
            self._steps = steps
            self._last = time.monotonic()

    @property
    def limit(self) -> float:
        """Seconds of silence after which the engine counts as hung; 0: never."""
        return self._limit if self._stepped else self._limit * FIRST_STEPS_FACTOR

    @property
    def silent_for(self) -> float:
        return time.monotonic() - self._last

    @property
    def stopped(self) -> bool:
        return 0 < self.limit < self.silent_for


class Restarts:
    """Recent restarts, and whether another one is allowed."""

    def __init__(self, supervision: Supervision) -> None:
        self._supervision = supervision
        self._times: deque[float] = deque()

    def next_delay(self) -> float | None:
        """Count another restart; seconds to wait before it. None: there were too many."""
        now, rules = time.monotonic(), self._supervision
        while self._times and now - self._times[0] > rules.window:
            self._times.popleft()
        if len(self._times) >= rules.max_restarts:
            return None
        delay = min(rules.longest_backoff, rules.backoff * 2.0 ** (len(self._times) - 1)) if self._times else 0.0
        self._times.append(now)
        return delay

    @property
    def recent(self) -> int:
        return len(self._times)


def loading_limit(first: float) -> float:
    """Seconds that a restart may take, given that the first start took `first`."""
    return max(LOADING_SECONDS, LOADING_FACTOR * first)
