"""Gives the front end's memory back to the system: garbage is collected, and what the allocator keeps is returned.

Requests leave no cycles, so their objects are freed without a collection. What a library leaves is collected here, when the
server is idle or its memory has grown. glibc keeps freed memory in its arenas until it is told to return it. Knows memory, no
requests.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path

from ridgeline.process.platform import return_freed_memory

COLLECT_AFTER = 10_000               # net allocations before a collection of the youngest generation: 4 ms
LARGE_BLOCK = 512 * 1024             # bytes; larger blocks are returned as soon as they are freed
LOOK_SECONDS = 1.0
GROWTH = 8 * 2**20                   # bytes above the smallest size seen that are worth looking at
MUCH_GROWTH = 32 * 2**20             # bytes since the last collection after which a busy server collects what is new …
VERY_MUCH_GROWTH = 256 * 2**20       # … and since the last of all objects, after which it looks at all of them
MOST_GROWTH = 2**30                  # since the last of all objects, after which it looks at them whatever their number
IDLE_GROWTH = 64 * 2**20             # the same for an idle server, …
IDLE_SECONDS = 10.0                  # … if the last collection of all objects is older than this
YOUNG = 1                            # the generation up to which a busy server collects: what it finds there becomes old
OLD = 2                              # all generations
MANY_OBJECTS = 60_000                # a collection takes half a microsecond for each: 30 ms
NEVER = 10**9                        # collections of one generation until Python collects the next by itself
LITTLE = 2**20                       # bytes
LONGEST_WAIT = 64.0                  # seconds until the next try when the last one gave nothing back

_M_MMAP_THRESHOLD = -3               # of malloc.h
_libc = ctypes.CDLL(None)


def collect_rarely() -> None:
    """The server's own objects are never garbage, and open streams live long. Python's default, a collection every 700 objects,
    takes a third of the time that a token costs in this process, most of it for old objects. Only new ones are collected by
    themselves, few at once; a crowd of connections is a million others, which MemoryKeeper looks at when there is time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, NEVER, NEVER)


def give_back_large_blocks() -> None:
    """Keep glibc's mmap threshold fixed. By default it grows to the largest block freed, and blocks below it stay with the
    process; with a fixed one, a body of 16 MB is returned to the system."""
    mallopt = getattr(_libc, "mallopt", None)            # only glibc has it, and needs it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)


def resident_bytes() -> int:
    """0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def num_objects(generation: int) -> int:
    """How many objects a collection of this generation and the younger ones looks at; counted in little of its time."""
    return sum(len(gc.get_objects(each)) for each in range(generation + 1))


class MemoryKeeper:
    """Decides once per second whether to collect garbage and to return freed memory.

    A collection stops the process for 5 ms per 10,000 objects, and a connection has about 80. So a busy server collects only if
    it has grown, and then among the objects that are new since the last collection. Among many objects it collects only if that
    may give as much memory back for the time: 3,000 connections would stop the server for 0.1 s. But small garbage is itself many
    objects, so there is a growth after which their number does not count; when no request is open, a smaller one.
    Each try that gives nothing back doubles the time to the next; growth, or work that takes much memory, begins anew.
    """

    def __init__(
        self, is_idle: Callable[[], bool], much_work: Callable[[], int], size: Callable[[], int] = resident_bytes,
        clock: Callable[[], float] = time.monotonic, objects: Callable[[int], int] = num_objects,
    ) -> None:
        """`much_work`: how much work that takes much memory was done so far; `objects`: how many a collection would look at."""
        self._is_idle = is_idle
        self._much_work = much_work
        self._done = 0
        self._size = size
        self._clock = clock
        self._objects = objects
        self._smallest = self._last = self._collected_at = self._all_collected_at = size()
        self._all_collected_on = -IDLE_SECONDS           # the time
        self._wait = LOOK_SECONDS
        self._next = 0.0                                 # the time of the next try

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self.is_due():
                self.collect()
                await asyncio.to_thread(return_freed_memory)
                self.note()

    def is_due(self) -> bool:
        size, done = self._size(), self._much_work()
        if abs(size - self._last) > LITTLE or done != self._done:
            self._wait, self._next = LOOK_SECONDS, min(self._next, self._clock())
        self._done = done
        self._smallest = min(self._smallest, size)
        self._last = size
        return size > self._smallest + GROWTH and self._clock() >= self._next

    def collect(self) -> None:
        if self._is_worth_all():
            gc.collect()
            self._all_collected_at = self._collected_at = self._size()
            self._all_collected_on = self._clock()
        elif self._last > self._collected_at + MUCH_GROWTH and self._objects(YOUNG) <= MANY_OBJECTS:
            gc.collect(YOUNG)
            self._collected_at = self._size()

    def _is_worth_all(self) -> bool:
        """Whether to look at all objects."""
        grown, is_idle = self._last - self._all_collected_at, self._is_idle()
        if grown > MOST_GROWTH:
            return True
        if is_idle and grown > IDLE_GROWTH and self._clock() >= self._all_collected_on + IDLE_SECONDS:
            return True
        if not is_idle and grown <= VERY_MUCH_GROWTH:
            return False
        objects = self._objects(OLD)
        return objects <= MANY_OBJECTS or grown > VERY_MUCH_GROWTH * objects / MANY_OBJECTS

    def note(self) -> None:
        """After a try: when the next one is due."""
        size = self._size()
        self._wait = LOOK_SECONDS if self._last - size > LITTLE else min(LONGEST_WAIT, 2 * self._wait)
        self._next = self._clock() + self._wait
        self._collected_at = min(self._collected_at, size)
        self._all_collected_at = min(self._all_collected_at, size)
        self._smallest, self._last = min(self._smallest, size), size
