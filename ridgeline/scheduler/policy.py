"""The scheduler's exchangeable choices: who is next, and when newcomers may join."""

from __future__ import annotations

from typing import Protocol

from ridgeline.scheduler.sequence import Sequence

AGED_PRIORITY = -(2**63)             # what a request that waited too long counts as: ahead of everybody


class Admission(Protocol):
    def open(self, num_running: int) -> bool:
        """May waiting sequences join the running ones in this step?"""

    def admitted(self, num_running: int, full: bool) -> None:
        """So many run now. `full`: whoever still waits finds no row or block, or nobody waits."""


class ContinuousBatching:
    def open(self, num_running: int) -> bool:
        return True

    def admitted(self, num_running: int, full: bool) -> None:
        """It is never too late to join."""


class StaticBatching:
    """The off version of continuous batching: a new batch starts only when the last one has finished whole.

    It may take several steps to fill, as long as prompts take, but nobody takes the place of one who has left.
    """

    def __init__(self) -> None:
        self._size = 0
        self._full = False

    def open(self, num_running: int) -> bool:
        return num_running == 0 or (num_running == self._size and not self._full)

    def admitted(self, num_running: int, full: bool) -> None:
        self._size, self._full = num_running, full


def rank(sequence: Sequence) -> tuple[int, int]:
    """Smaller goes first: by priority, then by arrival."""
    return (sequence.priority, sequence.order)

