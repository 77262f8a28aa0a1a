"""The scheduler's exchangeable choices: who is next, and when newcomers may join."""

from __future__ import annotations

from typing import Protocol

from ridgeline.scheduler.sequence import Sequence
from ridgeline.sizes.batch_levelling import Level

AGED_PRIORITY = -(2**63)             # what a request that waited too long counts as: ahead of everybody


class Admission(Protocol):
    def places(self, num_running: int, num_waiting: int) -> int:
        """How many of those who wait may join the running ones in this step."""

    def use_level(self, rows: int | None) -> int | None:
        """Those who wait now are all there will be: so many of them at once, None for as many as can. What will be done."""

    def admitted(self, num_running: int, full: bool) -> None:
        """So many run now. `full`: whoever still waits finds no row or block, or nobody waits."""


class ContinuousBatching:
    """It is never too late to join, but where there is a level."""

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
            self._level = None                           # all of them are in; whoever comes later is none of them
        return places

    def admitted(self, num_running: int, full: bool) -> None:
        if self._level is not None:
            self._level.begun(num_running, full)


class StaticBatching:
    """The off version of continuous batching: a new batch starts only when the last one has finished whole.

    It may take several steps to fill, as long as prompts take, but nobody takes the place of one who has left.
    """

    def __init__(self) -> None:
        self._size = 0
        self._full = False

    def places(self, num_running: int, num_waiting: int) -> int:
        return num_waiting if num_running == 0 or (num_running == self._size and not self._full) else 0

    def use_level(self, rows: int | None) -> int | None:
        return None                                      # nobody joins a batch

    def admitted(self, num_running: int, full: bool) -> None:
        self._size, self._full = num_running, full


def rank(sequence: Sequence) -> tuple[int, int]:
    """Smaller goes first: by priority, then by arrival."""
    return (sequence.turn.priority, sequence.turn.order)

