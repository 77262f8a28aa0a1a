"""A least-recently-used cache with a limit in bytes, for compiled grammars and verdicts on them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteLimitedCache(Generic[T]):
    """Safe to use from several threads. A value larger than the whole cache is not kept."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.hits = 0
        self.misses = 0
        self._bytes = 0
        self._entries: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def get(self, key: str) -> T | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: str, value: T, num_bytes: int) -> None:
        if num_bytes > self.capacity:
            return
        with self._lock:
            if key in self._entries:
                self._bytes -= self._entries.pop(key)[1]
            self._entries[key] = (value, num_bytes)
            self._bytes += num_bytes
            while self._bytes > self.capacity:
                self._bytes -= self._entries.popitem(last=False)[1][1]
