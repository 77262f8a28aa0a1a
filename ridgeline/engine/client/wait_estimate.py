"""Predicts how long a new request will wait, from the engine's recent throughput.

    wait = waiting prompt tokens / prompt tokens begun per second, measured while any waited
         = answers beyond max_num_seqs / answers finished per second, measured while any ran      (the longer of both)

Both rates decay with a half-life. Knows numbers and a clock; the caller decides whether to refuse a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HALF_LIFE = 20.0                     # seconds
LARGE = 0.1                          # share of all that may wait, above which a request asks for much, and is refused alone


class Rate:
    """Amounts per second of busy time."""

    __slots__ = ("_amount", "_seconds")

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def pass_time(self, seconds: float, busy: bool) -> None:
        kept = 0.5 ** (seconds / HALF_LIFE) if busy else 1.0     # idle time changes nothing
        self._amount *= kept
        self._seconds = self._seconds * kept + (seconds if busy else 0.0)

    def add(self, amount: float) -> None:
        self._amount += amount

    def per_second(self) -> float | None:
        return self._amount / self._seconds if self._amount and self._seconds > 0.01 else None


class LoadMeter:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.waiting_tokens = 0                          # prompt tokens of requests without a first token
        self.waiting_answers = 0
        self.open_answers = 0                            # waiting or running
        self._clock = clock
        self._last = clock()
        self._begun = Rate()
        self._finished = Rate()

    def queued(self, tokens: int, answers: int) -> None:
        self._pass_time()
        self.waiting_tokens += tokens
        self.waiting_answers += answers
        self.open_answers += answers

    def begun(self, tokens: int, answers: int) -> None:
        """The first token of a request came."""
        self._pass_time()
        self.waiting_tokens -= tokens
        self.waiting_answers -= answers
        self._begun.add(tokens)

    def left(self, tokens: int, answers: int, began: bool, finished: bool) -> None:
        self._pass_time()
        self.open_answers -= answers
        if not began:
            self.waiting_tokens -= tokens
            self.waiting_answers -= answers
        if finished:
            self._finished.add(answers)

    def wait(self, rows: int) -> float | None:
        """Seconds until a request that arrives now would begin; None: not known yet."""
        self._pass_time()
        waits: list[float | None] = []
        if self.waiting_tokens:
            rate = self._begun.per_second()
            waits.append(rate and self.waiting_tokens / rate)
        if self.open_answers >= rows:
            rate = self._finished.per_second()
            waits.append(rate and (self.open_answers + 1 - rows) / rate)
        known = [each for each in waits if each is not None]
        return max(known) if known else None if waits else 0.0

    def _pass_time(self) -> None:
        now = self._clock()
        seconds, self._last = now - self._last, now
        self._begun.pass_time(seconds, busy=self.waiting_tokens > 0)
        self._finished.pass_time(seconds, busy=self.open_answers > 0)
