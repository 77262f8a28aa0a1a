"""Responses that are kept for a while, so that a client can go on from one by its id or fetch it again.

In this process's memory alone, as JSON: bounded in number, bytes and time, whatever clients send; the oldest makes room. What
belongs to one API key does not exist for another. Knows bytes and ids; what a response is, is server/responses' to know.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

OVERHEAD = 1_024                     # bytes that an entry takes beside its text
KEPT_SECONDS = 3_600.0               # from its end


@dataclass(frozen=True, slots=True)
class Stored:
    key: int                         # which of the server's API keys it belongs to; 0: there are none
    response: bytes                  # as it was told
    input: bytes                     # the items that were sent with it …
    before: bytes                    # … and those of the conversation before them
    expires: float

    @property
    def size(self) -> int:
        return len(self.response) + len(self.input) + len(self.before) + OVERHEAD


class ResponseStore:
    """Safe to use from several threads: long bodies are read away from the event loop."""

    def __init__(self, most: int, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._clock = clock
        self._entries: OrderedDict[str, Stored] = OrderedDict()  # by id, the oldest first: they expire in that order
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_on(self) -> bool:
        return self._most > 0 and self._most_bytes > 0

    def put(self, name: str, key: int, response: bytes, given: bytes, before: bytes) -> None:
        """Keep it; one that is larger than all there is room for is not kept."""
        entry = Stored(key, response, given, before, self._clock() + KEPT_SECONDS)
        if entry.size > self._most_bytes or not self.is_on:
            return
        with self._lock:
            self._entries[name] = entry
            self.num_bytes += entry.size
            self._make_room()

    def get(self, name: str, key: int) -> Stored | None:
        """What is kept under that id for that key."""
        with self._lock:
            self._make_room()
            entry = self._entries.get(name)
        return entry if entry is not None and entry.key == key else None

    def delete(self, name: str, key: int) -> bool:
        """Forget it; False: there is none."""
        with self._lock:
            self._make_room()
            entry = self._entries.get(name)
            if entry is None or entry.key != key:
                return False
            self._drop(name)
            return True

    def _make_room(self) -> None:
        now = self._clock()
        while self._entries:
            name, oldest = next(iter(self._entries.items()))
            if oldest.expires > now and len(self._entries) <= self._most and self.num_bytes <= self._most_bytes:
                return
            self._drop(name)

    def _drop(self, name: str) -> None:
        self.num_bytes -= self._entries.pop(name).size
