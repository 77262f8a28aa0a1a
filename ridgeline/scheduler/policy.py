"""The scheduler's exchangeable choices: the order of waiting requests, and when they may join the batch."""

from __future__ import annotations

from typing import Protocol

from ridgeline.scheduler.sequence import Sequence
from ridgeline.sizes.batch_levelling import Level

AGED_PRIORITY = -(2**63)             # of a request that waited too long: ahead of all others


class Admission(Protocol):
    def places(self, num_running: int, num_waiting: int) -> int:
        """How many waiting sequences may join in this step."""

    def use_level(self, rows: int | None) -> int | None:
        """All requests are there: run at most that many rows at once, None: no limit. Returns the limit that will hold."""

    def admitted(self, num_running: int, full: bool) -> None:
        """How many run after this step's admissions. `full`: no row or block is left, or the queue is empty."""


class ContinuousBatching:
    """A sequence may join in any step, unless a level limits the batch."""

    def __init__(self) -> None:
        self._level: Level | None = None

    def use_level(self, rows: int | None) -> int | None:
        self._level = Level(rows) if rows is not None else None
        return rows

    def places(self, num_running: int, num_waiting: int) -> int:
        if self._level is None:
            return num_waiting
        places = self._level.places(num_running, num_waiting)
        if places == num_waiting:
            self._level = None                           # all of them have joined; later requests have no limit
        return places

    def admitted(self, num_running: int, full: bool) -> None:
        if self._level is not None:
            self._level.begun(num_running, full)


class StaticBatching:
    """The off version of continuous batching: a new batch starts only when the last one has finished whole.

    A batch may take several steps to fill, while prompts are computed. The row of a finished sequence stays empty.
    """

    def __init__(self) -> None:
        self._size = 0
        self._full = False

    def places(self, num_running: int, num_waiting: int) -> int:
        return num_waiting if num_running == 0 or (num_running == self._size and not self._full) else 0

    def use_level(self, rows: int | None) -> int | None:
        return None                                      # a running batch takes no new sequences

    def admitted(self, num_running: int, full: bool) -> None:
        self._size, self._full = num_running, full


def rank(sequence: Sequence) -> tuple[int, int]:
    """Smaller goes first: by priority, then by arrival."""
    return (sequence.turn.priority, sequence.turn.order)

