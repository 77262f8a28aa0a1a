"""The scheduler's exchangeable choices: who is next, and when newcomers may join."""

from __future__ import annotations

from typing import Protocol

from ridgeline.scheduler.sequence import Sequence

AGED_PRIORITY = -(2**63)             # what a request that waited too long counts as: ahead of everybody


class Admission(Protocol):
    def places(self, num_running: int, num_waiting: int) -> int:
        """How many of those who wait may join the running ones in this step."""

    def level(self, rows: int | None) -> None:
        """Until nobody waits, no more than so many are to run at once; None: as many as can."""

    def admitted(self, num_running: int, full: bool) -> None:
        """So many run now. `full`: whoever still waits finds no row or block, or nobody waits."""


class ContinuousBatching:
    """It is never too late to join. Below a level several join together, once a sixteenth of its rows is free: a token of many
    prompts in one step costs less than of one prompt beside decodes."""

    def __init__(self) -> None:
        self._level: int | None = None
        self._filling = False

    def level(self, rows: int | None) -> None:
        self._level, self._filling = rows, True

    def places(self, num_running: int, num_waiting: int) -> int:
        if self._level is None:
            return num_waiting
        free = self._level - num_running
        if free >= num_waiting:
            self._level = None
            return num_waiting
        self._filling |= free >= max(1, self._level // 16)
        return max(free, 0) if self._filling else 0

    def admitted(self, num_running: int, full: bool) -> None:
        self._filling = self._level is not None and num_running < self._level and not full


class StaticBatching:
    """The off version of continuous batching: a new batch starts only when the last one has finished whole.

    It may take several steps to fill, as long as prompts take, but nobody takes the place of one who has left.
    """

    def __init__(self) -> None:
        self._size = 0
        self._full = False

    def places(self, num_running: int, num_waiting: int) -> int:
        return num_waiting if num_running == 0 or (num_running == self._size and not self._full) else 0

    def level(self, rows: int | None) -> None:
        """A batch is what it is."""

    def admitted(self, num_running: int, full: bool) -> None:
        self._size, self._full = num_running, full


def rank(sequence: Sequence) -> tuple[int, int]:
    """Smaller goes first: by priority, then by arrival."""
    return (sequence.priority, sequence.order)

