"""Stores responses for an hour, so that a client can continue from one, refer to its items, or fetch it again, by id.

Only in this process's memory, as JSON, with limits on number, bytes and time. When a limit is reached, the oldest response of the
API key with the most bytes (or responses) is dropped, but none that still runs: its client could neither fetch nor cancel it. A
key sees only its own responses. Knows bytes and ids, not their meaning.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

OVERHEAD = 1_024                     # bytes per entry beside its text …
ITEM_OVERHEAD = 384                  # … and per item id in the index
KEPT_SECONDS = 3_600.0               # after its end


class NeedsStored(Exception):
    """The request refers to stored responses, which the process that reads it must be given."""

    def __init__(self, name: str | None, items: list[str]) -> None:
        super().__init__()
        self.name = name
        self.items = items


@dataclass(frozen=True, slots=True)
class Stored:
    key: int                         # the number of its API key; 0: the server has none
    response: bytes                  # as it was sent
    input: bytes                     # the request's own items …
    before: bytes                    # … and those of the conversation before them
    expires: float
    items: tuple[str, ...] = ()      # the ids of its own input and output
    runs: bool = False               # in the background
    size: int = field(init=False)

    def __post_init__(self) -> None:
        index = sum(map(len, self.items)) + ITEM_OVERHEAD * len(self.items)
        object.__setattr__(self, "size", len(self.response) + len(self.input) + len(self.before) + index + OVERHEAD)


@dataclass(slots=True)
class Holder:
    """The responses of one key."""

    entries: OrderedDict[str, Stored] = field(default_factory=OrderedDict)   # by id, the oldest first; none that runs
    num_running: int = 0
    items: dict[str, dict[str, None]] = field(default_factory=dict)          # item id -> the responses that have it
    num_bytes: int = 0


class ResponseStore:
    """Safe to use from several threads: long bodies are read away from the event loop."""

    def __init__(self, most: int, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._clock = clock
        self._entries: OrderedDict[str, Stored] = OrderedDict()  # by id, the oldest first: they expire in that order
        self._running: dict[str, Stored] = {}                    # the others, which are neither dropped nor expire
        self._holders: dict[int, Holder] = {}                    # by key; only keys with responses
        self._lock = threading.Lock()
        self.num_bytes = 0
        self.most_recalled: float = math.inf     # bytes of stored responses that a request may recall in this process

    def __len__(self) -> int:
        return len(self._entries) + len(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_on(self) -> bool:
        return self._most > 0 and self._most_bytes > 0

    def could_keep(self, num_bytes: int) -> bool:
        """Whether a response of that size could be stored."""
        return self.is_on and num_bytes + OVERHEAD <= self._most_bytes

    def put(
        self, name: str, key: int, response: bytes, given: bytes, before: bytes, items: Iterable[str] = (), runs: bool = False
    ) -> bool:
        """Store it. False: it is too large beside those that run, or was dropped again because its key holds the most."""
        entry = Stored(key, response, given, before, self._clock() + KEPT_SECONDS, tuple(items), runs)
        with self._lock:
            return self._add(name, entry)

    def replace(
        self, name: str, key: int, response: bytes, given: bytes, before: bytes, items: Iterable[str] = (), runs: bool = False
    ) -> bool:
        """Store it in place of the key's response of that id. False: there is none any more, or as for put()."""
        entry = Stored(key, response, given, before, self._clock() + KEPT_SECONDS, tuple(items), runs)
        with self._lock:                                 # between a delete() and a put(), a client may delete it, too
            self._make_room()
            earlier = self._find(name)
            if earlier is None or earlier.key != key:
                return False
            self._drop(name)
            return self._add(name, entry)

    def get(self, name: str, key: int) -> Stored | None:
        """The key's response of that id."""
        with self._lock:
            self._make_room()
            entry = self._find(name)
        return entry if entry is not None and entry.key == key else None

    def with_item(self, item: str, key: int) -> str | None:
        """The id of the key's newest response with that item in its input or output."""
        with self._lock:
            self._make_room()
            holder = self._holders.get(key)
            return next(reversed(holder.items[item])) if holder is not None and item in holder.items else None

    def referred(self, name: str | None, items: Iterable[str], key: int) -> dict[str, Stored]:
        """The key's responses, by id: the one of that name, and those with these items. What is not stored is left out."""
        names = {name, *(self.with_item(item, key) for item in items)}
        found = {each: self.get(each, key) for each in names if each is not None}
        return {each: entry for each, entry in found.items() if entry is not None}

    def size_of(self, name: str | None, items: Iterable[str], key: int) -> int:
        """The bytes of these responses. NeedsStored if they are too many to be read in this process."""
        items = list(items)
        size = sum(entry.size for entry in self.referred(name, items, key).values())
        if size > self.most_recalled:
            raise NeedsStored(name, items)
        return size

    def delete(self, name: str, key: int) -> bool:
        """Delete it; False: there is none."""
        with self._lock:
            self._make_room()
            entry = self._find(name)
            if entry is None or entry.key != key:
                return False
            self._drop(name)
            return True

    def _add(self, name: str, entry: Stored) -> bool:
        taken = sum(each.size for each in self._running.values())
        if entry.size + taken > self._most_bytes or len(self._running) >= self._most:
            return False
        holder = self._holders.setdefault(entry.key, Holder())
        if entry.runs:
            self._running[name] = entry
            holder.num_running += 1
        else:
            self._entries[name] = holder.entries[name] = entry
        for item in entry.items:
            holder.items.setdefault(item, {})[name] = None
        holder.num_bytes += entry.size
        self.num_bytes += entry.size
        self._make_room()
        return self._find(name) is not None

    def _make_room(self) -> None:
        now = self._clock()
        while self._entries:
            name, oldest = next(iter(self._entries.items()))
            if oldest.expires > now:
                break
            self._drop(name)
        while self.num_bytes > self._most_bytes:
            self._drop_of(lambda holder: holder.num_bytes)
        while len(self) > self._most:
            self._drop_of(lambda holder: len(holder.entries) + holder.num_running)

    def _find(self, name: str) -> Stored | None:
        return self._entries.get(name) or self._running.get(name)

    def _drop_of(self, share: Callable[[Holder], int]) -> None:
        """The oldest of the key with the largest share. There is one: those that run fit the limits by themselves."""
        self._drop(next(iter(max((each for each in self._holders.values() if each.entries), key=share).entries)))

    def _drop(self, name: str) -> None:
        entry = self._entries.pop(name, None) or self._running.pop(name)
        holder = self._holders[entry.key]
        if holder.entries.pop(name, None) is None:
            holder.num_running -= 1
        for item in set(entry.items):
            holder.items[item].pop(name)
            if not holder.items[item]:
                del holder.items[item]
        holder.num_bytes -= entry.size
        self.num_bytes -= entry.size
        if not holder.entries and not holder.num_running:
            del self._holders[entry.key]
