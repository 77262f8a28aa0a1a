"""The event loop of a front end: a turn takes few events of clients, and all others at once.

asyncio's own loop takes every event that is there. With 3,000 clients that send, a turn takes 0.1 s, and a health check waits for
three of them: to be accepted, to begin and to be read. Here clients' connections are a crowd: each turn takes a few of them, in
order, so a turn ends soon. Listeners, health checks and the engine's messages are not part of it. Knows file descriptors, no
connections. uvloop, where it is installed, is used as it is.
"""

from __future__ import annotations

import asyncio
import math
import select
import selectors
from collections.abc import Callable, Iterator, Mapping
from typing import Any

try:
    import uvloop
except ImportError:                  # optional
    uvloop = None  # type: ignore[assignment]

OF_CROWD = 32                        # events per turn
OTHERS = 256


class CrowdSelector(selectors.BaseSelector):
    """Two epoll objects, one inside the other: the inner one has the file descriptors in `crowd`."""

    def __init__(self) -> None:
        self.crowd: set[int] = set()                     # also before they are registered
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._in: dict[int, select.epoll] = {}           # where each is registered
        self._first, self._inner = select.epoll(), select.epoll()
        self._first.register(self._inner.fileno(), select.EPOLLIN)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = _number(fileobj)
        if number in self._keys:
            raise KeyError(f"{fileobj!r} (file {number}) is already registered")
        place = self._inner if number in self.crowd else self._first
        place.register(number, _asked(events))
        self._in[number] = place
        self._keys[number] = key = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        number = _number(fileobj)
        key = self._keys.pop(number)
        try:
            self._in.pop(number).unregister(number)
        except OSError:                                  # it was closed before
            pass
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = _number(fileobj)
        old = self._keys[number]
        if events != old.events:
            self._in[number].modify(number, _asked(events))
        self._keys[number] = key = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        seconds = None if timeout is None else max(0.0, math.ceil(timeout * 1e3) * 1e-3)     # epoll counts milliseconds
        try:
            found = self._first.poll(seconds, OTHERS)
        except InterruptedError:
            return []
        inner = self._inner.fileno()
        if any(number == inner for number, _ in found):
            found += self._inner.poll(0, OF_CROWD)       # in order: those that are taken go to the end of its list
        ready = []
        for number, event in found:
            key = self._keys.get(number)
            mask = _found(event) & key.events if key is not None else 0
            if key is not None and mask:
                ready.append((key, mask))
        return ready

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[_number(fileobj)]

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return _ByFile(self._keys)

    def close(self) -> None:
        self._keys.clear()
        self._inner.close()
        self._first.close()


class _ByFile(Mapping[Any, selectors.SelectorKey]):
    """Keys by number; a lookup also takes file objects, as asyncio's does since Python 3.13."""

    def __init__(self, keys: dict[int, selectors.SelectorKey]) -> None:
        self._keys = keys

    def __getitem__(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[_number(fileobj)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _number(fileobj: Any) -> int:
    return fileobj if isinstance(fileobj, int) else int(fileobj.fileno())


def _asked(events: int) -> int:
    return (events & selectors.EVENT_READ and select.EPOLLIN) | (events & selectors.EVENT_WRITE and select.EPOLLOUT)


def _found(event: int) -> int:
    """An error or an end is read, and written, as far as that was asked for."""
    read, write = event & ~select.EPOLLOUT, event & ~select.EPOLLIN
    return (read and selectors.EVENT_READ) | (write and selectors.EVENT_WRITE)


class FrontEndLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = CrowdSelector()
        super().__init__(selector)
        self.crowd = selector.crowd

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:     # type: ignore[override]
        """Not of the crowd, though a connection had the number before: transports do not use this."""
        self.crowd.discard(_number(fd))
        super().add_reader(fd, callback, *args)

    def add_crowd_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        self.crowd.add(fd)
        super().add_reader(fd, callback, *args)


def new_event_loop() -> asyncio.AbstractEventLoop:
    if uvloop is not None:
        return uvloop.new_event_loop()
    return FrontEndLoop() if hasattr(select, "epoll") else asyncio.new_event_loop()
