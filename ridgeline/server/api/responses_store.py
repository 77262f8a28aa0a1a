"""Responses that are kept for a while, so that a client can go on from one, or from an item of one, by its id or fetch it again.

In this process's memory alone, as JSON: bounded in number, bytes and time, whatever clients send. Room is made by those who hold
most: the oldest of the API key with the most bytes, or the most responses, goes first. What belongs to one key does not exist for
another. Knows bytes and ids; what a response is, is server/api/responses_answer' to know.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

OVERHEAD = 1_024                     # bytes that an entry takes beside its text …
ITEM_OVERHEAD = 384                  # … and each item's id in the index
KEPT_SECONDS = 3_600.0               # from its end


@dataclass(frozen=True, slots=True)
class Stored:
    key: int                         # which of the server's API keys it belongs to; 0: there are none
    response: bytes                  # as it was told
    input: bytes                     # the items that were sent with it …
    before: bytes                    # … and those of the conversation before them
    expires: float
    items: tuple[str, ...] = ()      # the ids of its own input and output
    size: int = field(init=False)

    def __post_init__(self) -> None:
        index = sum(map(len, self.items)) + ITEM_OVERHEAD * len(self.items)
        object.__setattr__(self, "size", len(self.response) + len(self.input) + len(self.before) + index + OVERHEAD)


@dataclass(slots=True)
class Holder:
    """What belongs to one key."""

    entries: OrderedDict[str, Stored] = field(default_factory=OrderedDict)   # by id, the oldest first
    items: dict[str, dict[str, None]] = field(default_factory=dict)          # of an item's id: the responses that have it
    num_bytes: int = 0


class ResponseStore:
    """Safe to use from several threads: long bodies are read away from the event loop."""

    def __init__(self, most: int, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._clock = clock
        self._entries: OrderedDict[str, Stored] = OrderedDict()  # by id, the oldest first: they expire in that order
        self._holders: dict[int, Holder] = {}                    # by key; only those who have something
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_on(self) -> bool:
        return self._most > 0 and self._most_bytes > 0

    def could_keep(self, num_bytes: int) -> bool:
        """Whether so much text may be kept at all."""
        return self.is_on and num_bytes + OVERHEAD <= self._most_bytes

    def put(self, name: str, key: int, response: bytes, given: bytes, before: bytes, items: Iterable[str] = ()) -> bool:
        """Keep it. False: it is larger than all there is room for, or than what is left of it beside those who hold less."""
        entry = Stored(key, response, given, before, self._clock() + KEPT_SECONDS, tuple(items))
        if entry.size > self._most_bytes or not self.is_on:
            return False
        with self._lock:
            self._entries[name] = entry
            holder = self._holders.setdefault(key, Holder())
            holder.entries[name] = entry
            for item in entry.items:
                holder.items.setdefault(item, {})[name] = None
            holder.num_bytes += entry.size
            self.num_bytes += entry.size
            self._make_room()
            return name in self._entries

    def get(self, name: str, key: int) -> Stored | None:
        """What is kept under that id for that key."""
        with self._lock:
            self._make_room()
            entry = self._entries.get(name)
        return entry if entry is not None and entry.key == key else None

    def with_item(self, item: str, key: int) -> str | None:
        """The id of the newest response of that key that has an item of that id among its input or output."""
        with self._lock:
            self._make_room()
            holder = self._holders.get(key)
            return next(reversed(holder.items[item])) if holder is not None and item in holder.items else None

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
            if oldest.expires > now:
                break
            self._drop(name)
        while self.num_bytes > self._most_bytes:
            self._drop_of(max(self._holders.values(), key=lambda holder: holder.num_bytes))
        while len(self._entries) > self._most:
            self._drop_of(max(self._holders.values(), key=lambda holder: len(holder.entries)))

    def _drop_of(self, holder: Holder) -> None:
        self._drop(next(iter(holder.entries)))

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name)
        holder = self._holders[entry.key]
        del holder.entries[name]
        for item in set(entry.items):
            holder.items[item].pop(name)
            if not holder.items[item]:
                del holder.items[item]
        holder.num_bytes -= entry.size
        self.num_bytes -= entry.size
        if not holder.entries:
            del self._holders[entry.key]
