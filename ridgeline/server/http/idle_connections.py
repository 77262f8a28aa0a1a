"""Which connections give way when all are taken: those that wait longest for their client: for a request, or the rest of one.

Without this, a client without a key could hold all connections by saying nothing on them, and shut out all others.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import nsmallest
from typing import Any, Protocol

SHARE = 16                           # one in so many of all is closed at once: to find them takes 1 ms for 4,096


class Connection(Protocol):
    @property
    def idle_since(self) -> float | None:
        """Since when it waits for the head of a request, or for the rest of a body that has stopped; None while a request is read
        or answered."""

    def give_way(self) -> None:
        """Close at once."""


def make_room(connections: set[Any]) -> int:
    """Close some Connections that wait longest. How many; 0 if none is idle."""
    chosen = longest_idle(connections, max(1, len(connections) // SHARE))
    for connection in chosen:
        connections.discard(connection)                  # it is told of its end in the loop's next turn
        connection.give_way()
    return len(chosen)


def longest_idle(connections: Collection[Connection], count: int) -> list[Connection]:
    idle = [(since, number, each) for number, each in enumerate(connections) if (since := each.idle_since) is not None]
    return [each for _, _, each in nsmallest(count, idle)]
